"""Record the handshakes that this node rejected lately: per host and reason, how often and when.

Pure: takes hosts, errors and times. Knows nothing of their use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import UNSET, UnsetType

from shardnet.errors import AuthenticationError, ShardnetError, VersionMismatchError
from shardnet.types import remember
from shardnet.wire.messages.diagnostics import MAX_REASON, MAX_VIEWS, RefusedHost
from shardnet.wire.messages.handshake import explained

_OF_NODES: Final = (AuthenticationError.code, VersionMismatchError.code)


@dataclass(slots=True, kw_only=True)
class _Rejected:
    why: str
    remedy: str | UnsetType
    n_times: int
    last: float


class RejectedHandshakes:
    """The rejected handshakes of at most `most` pairs of host and error; the oldest are dropped."""

    def __init__(self, *, most: int = MAX_VIEWS) -> None:
        self._most: Final = most
        self._by_host: dict[tuple[str, int], _Rejected] = {}

    def note(self, host: str, error: ShardnetError, now: float) -> None:
        """Record a failed handshake of `host`. `now` is in seconds of any one clock."""
        key = (_plain(host), error.code)
        rejected = self._by_host.get(key) or _Rejected(why="", remedy=UNSET, n_times=0, last=now)
        rejected.why, rejected.remedy = explained(error, MAX_REASON)
        rejected.last = now
        rejected.n_times += 1
        remember(self._by_host, key, rejected, self._most)

    def forget(self, host: str) -> None:
        """Forget what was wrong with a host's key or version: a node there has linked since."""
        for code in _OF_NODES:
            self._by_host.pop((_plain(host), code), None)

    def report(self, now: float) -> list[RefusedHost]:
        """Return the rejected hosts, the latest first."""
        return [
            RefusedHost(
                host=host,
                code=code,
                why=rejected.why,
                n_times=rejected.n_times,
                age_s=max(0.0, now - rejected.last),
                remedy=rejected.remedy,
            )
            for (host, code), rejected in reversed(self._by_host.items())
        ]


def _plain(host: str) -> str:
    """Return the IPv4 host of an address that came by IPv6, others as they are."""
    return host.removeprefix("::ffff:")
