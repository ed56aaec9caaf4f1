"""Whom this node has refused of late: per host and reason, how often and when.

Pure: it is told hosts, errors and times. Knows nothing of what is done about it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET, UnsetType

from shardnet.errors import ShardnetError
from shardnet.wire.messages.diagnostics import MAX_REASON, MAX_VIEWS, RefusedHost
from shardnet.wire.messages.handshake import explained


@dataclass(slots=True, kw_only=True)
class _Refused:
    why: str
    remedy: str | UnsetType
    n_times: int
    last: float


class RejectedHandshakes:
    """The most recent refused handshakes; the longest unheard of make room for others."""

    def __init__(self, *, most: int = MAX_VIEWS) -> None:
        self._most: Final = most
        self._by_host: OrderedDict[tuple[str, int], _Refused] = OrderedDict()

    def note(self, host: str, error: ShardnetError, now: float) -> None:
        """Take a handshake of `host` that has failed. `now` is in seconds of any one clock."""
        key = (host.removeprefix("::ffff:"), error.code)
        refused = self._by_host.setdefault(key, _Refused(why="", remedy=UNSET, n_times=0, last=now))
        refused.why, refused.remedy = explained(error, MAX_REASON)
        refused.last = now
        refused.n_times += 1
        self._by_host.move_to_end(key)
        if len(self._by_host) > self._most:
            self._by_host.popitem(last=False)

    def report(self, now: float) -> list[RefusedHost]:
        """Return them, the latest first."""
        return [
            RefusedHost(
                host=host,
                code=code,
                why=refused.why,
                n_times=refused.n_times,
                age_s=max(0.0, now - refused.last),
                remedy=refused.remedy,
            )
            for (host, code), refused in reversed(self._by_host.items())
        ]
