"""Who may shake hands, who waits and who must go, so that no stranger keeps others out.

Pure: gets hosts, tickets of connections and times as arguments; no socket or clock.

A connection that was accepted is silent until its first byte comes, then ready, then shaking hands
(TLS and hello), and then gone from here. Only the last costs memory and computing. Ready ones take
turns by host. Where there is no room, the host that holds most makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from shardnet.errors import ShardnetError
from shardnet.types import remember

GRACE_S: Final = 1.0
"""A handshake may take this long before it can be ended in favour of another one."""
SPENT_S: Final = 1.0
"""A handshake that failed counts for so long from its beginning: it has cost computing time."""
KEPT_SHARE: Final = 4
"""One of so many handshakes is kept for known hosts."""
MAX_HOSTS: Final = 256
"""So many hosts are remembered: those that are known, and those whose failures were reported."""
MAX_REPORTED: Final = 8
"""So many different failures of a host are reported."""


class KnownHosts:
    """The hosts with which a link has come up lately, in either direction."""

    def __init__(self, *, most: int = MAX_HOSTS) -> None:
        self._most = most
        self._names: dict[str, None] = {}

    def add(self, address: str) -> None:
        """Remember the host of an IP address; the longest unseen one is forgotten for it."""
        remember(self._names, host_name(address), None, self._most)

    def __contains__(self, address: str) -> bool:
        return host_name(address) in self._names


class ReportedFailures:
    """Which failures of which hosts were reported, so that each is once."""

    def __init__(self) -> None:
        self._by_host: dict[str, set[str]] = {}

    def is_news(self, address: str, error: ShardnetError) -> bool:
        """Return whether to report `error`: once per host and message, until `clear`.

        What a stranger says may be part of the message: MAX_REPORTED of a host are reported.
        """
        name = host_name(address)
        reported = self._by_host.get(name, set())
        remember(self._by_host, name, reported, MAX_HOSTS)
        if error.message in reported or len(reported) == MAX_REPORTED:
            return False
        reported.add(error.message)
        return True

    def clear(self, address: str) -> None:
        """Forget what was reported of a host, since a link from there has come up."""
        self._by_host.pop(host_name(address), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Tickets whose handshake begins now, and of handshakes that end in their favour."""

    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Host:
    """The connections of a host: tickets with the times of arrival or beginning, oldest first.

    `spent` are the times at which handshakes that failed stop to count. `n_turns` counts the
    handshakes that have begun and not come up, while any connection of the host is here.
    """

    name: str
    is_known: bool = False
    silent: dict[int, float] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)
    shaking: dict[int, float] = field(default_factory=dict)
    spent: list[float] = field(default_factory=list)
    n_turns: int = 0

    @property
    def n_waiting(self) -> int:
        return len(self.silent) + len(self.ready)

    @property
    def n_handshakes(self) -> int:
        return len(self.shaking) + len(self.spent)


class Admission:
    """The connections of a listener whose link is not up yet.

    Of at most `connections` in all, `handshakes` may shake hands at one time, `per_host` of them
    from one host, and a quarter of them is kept for `known` hosts. Others wait for their turn, for
    at most `wait_s` seconds. Times are seconds of one clock.
    """

    def __init__(
        self, *, connections: int, handshakes: int, per_host: int, wait_s: float, known: KnownHosts
    ) -> None:
        self._connections = connections
        self._handshakes = handshakes
        self._for_strangers = handshakes - handshakes // KEPT_SHARE
        self._per_host = per_host
        self._wait_s = wait_s
        self._known = known
        self._hosts: dict[str, _Host] = {}
        self._tickets: dict[int, _Host] = {}
        self._in_turn: dict[str, _Host] = {}

    @property
    def n_waiting(self) -> int:
        """How many connections are silent or wait for their turn."""
        return sum(host.n_waiting for host in self._hosts.values())

    def arrive(self, ticket: int, address: str, now: float) -> int | None:
        """Count a connection that was accepted, silent so far.

        Returns the ticket of the connection to close for it, which may be its own, None where there
        is room. That is the one which has waited longest of the host with most that wait. While
        strangers wait, no known host's connection is closed for another.
        """
        name = host_name(address)
        host = self._hosts.setdefault(name, _Host(name))
        host.is_known = name in self._known
        host.silent[ticket] = now
        self._tickets[ticket] = host
        if len(self._tickets) <= self._connections:
            return None
        closed = self._least_likely(host, ticket, now)
        self.forget(closed)
        return closed

    def speak(self, ticket: int) -> None:
        """Note that the first byte of a connection has come; `take_turns` may begin with it."""
        host = self._tickets[ticket]
        host.ready[ticket] = host.silent.pop(ticket)
        self._in_turn.setdefault(host.name, host)

    def forget(self, ticket: int) -> None:
        """Forget a connection that is closed."""
        host = self._tickets.pop(ticket)
        for tickets in (host.silent, host.ready, host.shaking):
            tickets.pop(ticket, None)
        self._tidy(host)

    def shed(self) -> int | None:
        """Choose a waiting connection to close, and forget it. None where none waits."""
        waiting = [host for host in self._hosts.values() if host.n_waiting]
        if not waiting:
            return None
        host = max(waiting, key=lambda host: host.n_waiting)
        ticket = next(iter(host.silent or host.ready))
        self.forget(ticket)
        return ticket

    def expired(self, now: float) -> list[int]:
        """Return the connections that have waited too long; each is still to be forgotten."""
        limit = now - self._wait_s
        return [
            ticket
            for host in self._hosts.values()
            for tickets in (host.silent, host.ready)
            for ticket, since in tickets.items()
            if since <= limit
        ]

    def take_turns(self, now: float) -> Turns:
        """Begin handshakes of connections that are ready, as many as may be.

        Known hosts come first, then those that have had the fewest turns.
        Where there is no room, a handshake that has taken longer than GRACE_S is ended: the oldest
        one of the host with most, and never in favour of a host that has as many.
        """
        for host in list(self._hosts.values()):
            host.spent = [until for until in host.spent if until > now]
            self._tidy(host)
        turns = Turns()
        if self._in_turn:
            room = _Room(self._hosts.values(), now)
            for is_known in (True, False):
                hosts = [host for host in self._in_turn.values() if host.is_known is is_known]
                hosts.sort(key=lambda host: host.n_turns)
                while hosts:
                    hosts = [host for host in hosts if self._take_turn(host, room, turns)]
        return turns

    def leave(self, ticket: int, now: float, *, failed: bool) -> None:
        """Count a handshake that is over, perhaps because `take_turns` has ended it."""
        host = self._tickets.get(ticket)
        if host is None:
            return
        spent_until = host.shaking[ticket] + SPENT_S
        if not failed:
            host.n_turns -= 1
            self._known.add(host.name)
            host.is_known = True
        elif spent_until > now:
            host.spent.append(spent_until)
        self.forget(ticket)

    def _take_turn(self, host: _Host, room: _Room, turns: Turns) -> bool:
        """Begin one handshake of a host, if there is room. Returns whether it may have another."""
        rivals = self._rivals(host, room)
        if rivals is not None:
            slow = room.slow_one(rivals, host)
            if slow is None:
                return False
            room.count(self._tickets[slow], -1)
            self.forget(slow)
            turns.ended.append(slow)
        ticket = next(iter(host.ready))
        del host.ready[ticket]
        host.shaking[ticket] = room.now
        host.n_turns += 1
        room.count(host, 1)
        turns.begun.append(ticket)
        self._tidy(host)
        return bool(host.ready)

    def _rivals(self, host: _Host, room: _Room) -> Iterable[_Host] | None:
        """Return the hosts of which one would have to end a handshake, None if there is room."""
        if host.n_handshakes >= self._per_host:
            return (host,)
        if not host.is_known and room.n_of_strangers >= self._for_strangers:
            return [other for other in room.hosts if not other.is_known]
        if room.n_in_all >= self._handshakes:
            return room.hosts
        return None

    def _least_likely(self, newest_of: _Host, newest: int, now: float) -> int:
        """Return the waiting connection that is least likely to become a link."""
        waiting = [host for host in self._hosts.values() if host.n_waiting]
        waiting = [host for host in waiting if not host.is_known] or waiting
        most = max(host.n_waiting for host in waiting)
        others = [h for h in waiting if h.n_waiting == most and h is not newest_of]
        if others:
            others = [host for host in others if host.silent] or others
            oldest = min(others, key=lambda host: _oldest(host.silent or host.ready))
            return next(iter(oldest.silent or reversed(oldest.ready)))
        ticket, since = next(iter(newest_of.silent.items()))
        return ticket if since <= now - GRACE_S else newest

    def _tidy(self, host: _Host) -> None:
        """Forget a host of which nothing is left."""
        if not host.ready:
            self._in_turn.pop(host.name, None)
        if not (host.n_waiting or host.n_handshakes):
            self._hosts.pop(host.name, None)


class _Room:
    """The handshakes under way, counted once for all the turns that are taken at one time."""

    def __init__(self, hosts: Iterable[_Host], now: float) -> None:
        self.now = now
        self.hosts = list(hosts)
        self.n_in_all = sum(host.n_handshakes for host in self.hosts)
        self.n_of_strangers = sum(h.n_handshakes for h in self.hosts if not h.is_known)
        self._any_is_slow = any(self._is_slow(host) for host in self.hosts)

    def slow_one(self, rivals: Iterable[_Host], host: _Host) -> int | None:
        """Return the handshake of `rivals` to end in favour of `host`, None if none may be."""
        if not self._any_is_slow:
            return None
        slow = [
            rival
            for rival in rivals
            if self._is_slow(rival) and (rival is host or rival.n_handshakes > host.n_handshakes)
        ]
        if not slow:
            return None
        most = max(slow, key=lambda rival: (rival.n_handshakes, -_oldest(rival.shaking)))
        return next(iter(most.shaking))

    def count(self, host: _Host, n: int) -> None:
        """Count `n` more handshakes of `host`."""
        self.n_in_all += n
        if not host.is_known:
            self.n_of_strangers += n

    def _is_slow(self, host: _Host) -> bool:
        return bool(host.shaking) and _oldest(host.shaking) <= self.now - GRACE_S


def _oldest(tickets: dict[int, float]) -> float:
    return next(iter(tickets.values()))


def host_name(address: str) -> str:
    """Name whom an address belongs to: an IPv6 host owns all the addresses of its network."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:  # the peer left before it was asked, or it is a name already
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, 64), strict=False))
