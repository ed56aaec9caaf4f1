"""How an HTTP server is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardnet.api.chat_formats.choice import MOST_EQUAL_CALLS
from shardnet.api.server.keys import Keyring

MAX_BODY_BYTES = 36 << 20
"""The largest body that is read: pictures of 24 MiB in base64, and a long conversation."""

MAX_REQUESTS = 1024
"""Requests that a server works on at once."""

HEADERS_S = 3.0
"""A stream's status is sent after so long at the latest. Errors before it have their own."""

HEARTBEAT_S = 8.0
"""A stream in which nothing comes for so long gets a comment: programs give up after 10 s."""


class LogLine(str):
    """A line of the log for people; its `facts` are for programs."""

    __slots__ = ("facts",)

    facts: dict[str, object]

    @classmethod
    def of(cls, line: str, **facts: object) -> LogLine:
        """Make a line with its facts."""
        made = cls(line)
        made.facts = facts
        return made


def _silent(line: str) -> None:
    """Log nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Keys, limits and names. `log` takes one line; that of a request is a LogLine.

    `cors_origins` are the web sites whose pages may ask, "*" for all. Without keys, `allowed_hosts`
    are the names that this server may be asked for by, beside those that mean a machine at hand.
    `root_path` is where a proxy has this server, "" for the root of its site. Without `may_switch`
    the ring keeps the model it has. One that no request has used for `idle_unload_s` seconds is
    unloaded, never for None. `aliases` are other names of models, "*" of all others. With
    `has_deputy` requests are copied to another node, which goes on if the head of the ring is lost.
    With `fetches_pictures` those that a request names by their URL are fetched. Of equal tool calls
    in a row an answer has `most_equal_calls`, with 0 all. Requests that do not say how to draft
    `speculate` so; those that do not say how long to think, at most `thought_budget` tokens.
    """

    keys: Keyring = field(default_factory=Keyring)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    most_body_bytes: int = MAX_BODY_BYTES
    most_requests: int = MAX_REQUESTS
    headers_s: float = HEADERS_S
    heartbeat_s: float = HEARTBEAT_S
    log: Callable[[str], None] = _silent
    may_switch: bool = True
    idle_unload_s: float | None = None
    has_deputy: bool = False
    fetches_pictures: bool = False
    most_equal_calls: int = MOST_EQUAL_CALLS
    aliases: Mapping[str, str] = field(default_factory=dict)
    speculate: str = "off"
    thought_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a server listens; `certificate` and `private_key` are files for TLS, "" for none.

    With `cluster_secret` it makes certificates of its own, by the authority of the cluster key.
    With a `name` it is announced by mDNS, on the interfaces of `mdns_interfaces` where any are
    named.
    """

    host: str
    port: int
    certificate: str = ""
    private_key: str = ""
    cluster_secret: bytes = field(default=b"", repr=False)
    name: str = ""
    mdns_interfaces: tuple[str, ...] = ()

    @property
    def is_secure(self) -> bool:
        """Whether it serves HTTPS."""
        return bool(self.certificate or self.cluster_secret)

    settings: Settings = field(default_factory=Settings)
