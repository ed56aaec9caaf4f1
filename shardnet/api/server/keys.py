"""API keys: who may ask, how many requests each may have at once, how many tokens a minute.

Without keys, which web pages may ask. Every page that a person opens can send requests to this
machine's loopback addresses, and a page whose name is made to mean 127.0.0.1 can read the answers
too. What browsers say of a request tells both: the name it was sent to (Host) and the page it comes
from (Origin, Sec-Fetch-Site). Programs send neither of the latter. Pure. Must not know HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from shardnet.api.server.errors import refused
from shardnet.errors import ConfigurationError
from shardnet.types import remember, whole_number

MAX_LIMIT = 1_000_000
MAX_TOKENS = 1_000_000_000
MINUTE_S: Final = 60.0
_NAMED: Final = "NAME:KEY[:LIMIT[:TOKENS]]"
_SHORT_DIGITS: Final = len(str(MAX_LIMIT))
"""Fewer digits than that alone are a limit, not a key."""
MOST_GUESSES: Final = 10
GUESS_S: Final = 3.0
MAX_HOSTS: Final = 4096
"""So many hosts are remembered that sent wrong keys, and that sent right ones."""


_PRIVATE: Final = ("localhost", "local", "internal", "home.arpa")
"""Names below these mean nothing in the public DNS: no stranger can make one mean this machine."""
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that programs send.

    `most_requests` is how many it may have at once, `tokens_per_minute` how many tokens of prompts
    and answers together; 0 is any number.
    """

    name: str
    secret: str
    most_requests: int = 0
    tokens_per_minute: int = 0


def parse_key(text: str, number: int) -> ApiKey:
    """Read `KEY` or `NAME:KEY[:LIMIT[:TOKENS]]`. A key without a name is called by its `number`.

    Raises ConfigurationError, which does not repeat the key, if it is neither, and for a named key
    of few digits: KEY:LIMIT is meant, and whoever sends the limit would get in.
    """
    parts = text.strip().split(":")
    what = f"API key {number}"
    if len(parts) > 4 or not all(part.isascii() and part.isprintable() for part in parts):
        raise ConfigurationError(f"{what} is not KEY or {_NAMED}", remedy="correct it")
    if len(parts) == 2 and parts[1].isdecimal() and len(parts[1]) < _SHORT_DIGITS:
        raise ConfigurationError(
            f"{what} has a short number behind its one colon, which reads as the KEY of NAME:KEY",
            remedy="write NAME:KEY:LIMIT for a limit, or take a longer key",
        )
    if len(parts) == 1:
        parts = [str(number), *parts]
    if not parts[0] or not parts[1]:
        raise ConfigurationError(f"{what} has an empty part", remedy=f"write {_NAMED}")
    limits = []
    for text, most in zip([*parts[2:], "0", "0"], (MAX_LIMIT, MAX_TOKENS), strict=False):
        limit = whole_number(text)
        if limit is None or limit > most:
            raise ConfigurationError(
                f"{what} has the limit '{text:.40}', which is no number up to {most}",
                remedy="write NAME:KEY:8, or NAME:KEY:8:20000",
            )
        limits.append(limit)
    n_requests, n_tokens = limits
    return ApiKey(
        name=parts[0], secret=parts[1], most_requests=n_requests, tokens_per_minute=n_tokens
    )


class Keyring:
    """The keys of a server, and what runs with each."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        """Take the keys. Raises ConfigurationError where two have one name or one secret."""
        self._keys = [(_digest(key.secret), key) for key in keys]
        names, secrets = {key.name for key in keys}, {key.secret for key in keys}
        for what, values in (("name", names), ("secret", secrets)):
            if len(values) < len(keys):
                raise ConfigurationError(
                    f"two API keys have the same {what}", remedy="give each its own"
                )
        self._running: Counter[str] = Counter()
        self._paid_s: dict[str, float] = {}
        """When a key's tokens so far are paid for, at its tokens per minute."""

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret, None if there is none.

        How long that takes tells nothing of the secrets: digests of all are compared.
        """
        digest, found = _digest(secret), None
        for known, key in self._keys:
            if hmac.compare_digest(digest, known):
                found = key
        return found

    @contextmanager
    def place(self, key: ApiKey | None) -> Iterator[bool]:
        """Count a request of `key` while it runs. Yields False if that has too many already."""
        if key is None or not key.most_requests:
            yield True
        elif self._running[key.name] >= key.most_requests:
            yield False
        else:
            self._running[key.name] += 1
            try:
                yield True
            finally:
                self._running[key.name] -= 1

    def wait_s(self, key: ApiKey, now_s: float) -> float:
        """Return after how many seconds a key may have tokens again, 0 for now.

        A key that has had none for a minute has those of a minute at once.
        """
        return max(0.0, self._paid_s.get(key.name, 0.0) - MINUTE_S - now_s)

    def spend(self, key: ApiKey, n_tokens: int, now_s: float) -> None:
        """Count the tokens of a request that has ended."""
        if key.tokens_per_minute:
            since_s = max(now_s, self._paid_s.get(key.name, 0.0))
            self._paid_s[key.name] = since_s + n_tokens * MINUTE_S / key.tokens_per_minute


class WrongKeys:
    """How often hosts have sent wrong keys: MOST_GUESSES at once, then one in GUESS_S seconds.

    A host that has sent a right key lately is never kept waiting: others may share its address.
    """

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}
        self._known: dict[str, None] = {}

    def wait_s(self, host: str, now_s: float) -> float:
        """Return after how many seconds a host may send a key, 0 for now."""
        ahead_s = self._free_s.get(host, 0.0) - now_s
        return 0.0 if host in self._known else max(0.0, ahead_s - (MOST_GUESSES - 1) * GUESS_S)

    def wrong(self, host: str, now_s: float) -> None:
        """Count a wrong key."""
        free_s = max(self._free_s.get(host, 0.0), now_s) + GUESS_S
        remember(self._free_s, host, free_s, MAX_HOSTS)

    def right(self, host: str) -> None:
        """Note a right key."""
        self._free_s.pop(host, None)
        remember(self._known, host, None, MAX_HOSTS)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def check_web_page(
    method: str, headers: Mapping[bytes, bytes], hosts: Sequence[str], origins: Sequence[str]
) -> None:
    """Check a request to a server without a key; `headers` are by lower-case name.

    Beside loopback's names, `hosts` may be asked for, and beside the server's own pages, those of
    `origins` may ask; "*" is any. Raises HttpError 403.
    """

    def text(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1").strip().lower()

    host, origin, site = text(b"host"), text(b"origin"), text(b"sec-fetch-site")
    if not _is_own_name(_without_port(host), hosts):
        raise refused(
            f"this server is not called {host[:200]}: give it --allowed-host "
            f"{_without_port(host)[:200]}, or an --api-key",
            status=403,
        )
    if site in ("same-origin", "none") or "*" in origins:
        return
    if origin:
        if not _may_ask(origin, host, origins):
            raise refused(
                f"pages of {origin[:200]} may not ask this server: give it --cors-origin "
                f"{origin[:200]}, or an --api-key",
                status=403,
            )
    elif site and not (method == "GET" and text(b"sec-fetch-mode") == "navigate"):
        raise refused("pages of other sites may not ask this server", status=403)


def _is_own_name(name: str, hosts: Sequence[str]) -> bool:
    """Say whether no public name server can have given this name to the client."""
    if not name or "." not in name or "*" in hosts or name in map(str.lower, hosts):
        return True
    if any(name.endswith(f".{private}") for private in _PRIVATE):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _may_ask(origin: str, host: str, origins: Sequence[str]) -> bool:
    """Say whether a page may ask, by its scheme, name and port."""
    if origin in (one.lower().rstrip("/") for one in origins):
        return True
    scheme, _, place = origin.partition("://")
    if scheme not in _DEFAULT_PORTS:  # an extension or a program with windows, or hidden: "null"
        return origin != "null"
    port = _DEFAULT_PORTS[scheme]
    return place.removesuffix(port) == host.removesuffix(port)
