"""Who may begin a handshake, so that strangers take neither memory nor the loop.

Pure: gets hosts, counts and times as arguments; no socket or clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from shardnet.errors import LinkError, ShardnetError

PENALTY_S: Final = 1.0
"""A handshake that failed keeps its host's place for so long: a handshake costs a millisecond."""
MAX_HOSTS: Final = 256
"""So many hosts are remembered when none of their handshakes is open."""


@dataclass(slots=True)
class _Host:
    n_open: int = 0
    penalties: deque[float] = field(default_factory=deque)
    reported: set[type[ShardnetError]] = field(default_factory=set)


class Admission:
    """Counts the open handshakes of a listener, in all and per host.

    `total` and `per_host` are how many may be open at one time. Times are seconds of one clock.
    """

    def __init__(self, *, total: int, per_host: int) -> None:
        self._total = total
        self._per_host = per_host
        self._n_open = 0
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    def enter(self, address: str, now: float) -> None:
        """Count a handshake that begins. Raises LinkError when it may not."""
        host = self._host(address)
        while host.penalties and host.penalties[0] <= now:
            host.penalties.popleft()
        if self._n_open >= self._total:
            raise LinkError(f"refused, {self._n_open} other handshakes are open")
        if host.n_open + len(host.penalties) >= self._per_host:
            raise LinkError(
                f"refused, {host.n_open} handshakes of that host are open and "
                f"{len(host.penalties)} have just failed"
            )
        host.n_open += 1
        self._n_open += 1

    def leave(self, address: str, now: float, *, failed: bool) -> None:
        """Count a handshake that has ended."""
        host = self._host(address)
        host.n_open -= 1
        self._n_open -= 1
        if failed:
            host.penalties.append(now + PENALTY_S)
        else:
            host.reported.clear()

    def is_news(self, address: str, error: ShardnetError) -> bool:
        """Return whether to log `error`: once per host and kind, until a link comes up."""
        reported = self._host(address).reported
        if type(error) in reported:
            return False
        reported.add(type(error))
        return True

    def _host(self, address: str) -> _Host:
        """Find or make the entry of a host; the longest unseen one without handshakes may go."""
        name = _name(address)
        host = self._hosts.setdefault(name, _Host())
        self._hosts.move_to_end(name)
        if len(self._hosts) > MAX_HOSTS:
            idle = (name for name, host in self._hosts.items() if not host.n_open)
            oldest = next(idle)
            if self._hosts[oldest] is not host:
                del self._hosts[oldest]
        return host


def _name(address: str) -> str:
    """Name whom an address belongs to: an IPv6 host owns all the addresses of its network."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:  # the peer left before it was asked
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, 64), strict=False))
