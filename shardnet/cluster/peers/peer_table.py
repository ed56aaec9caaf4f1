"""The table of known nodes: sources, addresses, failures, and which node to dial next.

A pure state machine: it takes reports, attempts and measurements, with the time, and returns the
nodes that are due. It records why a node was not reached, for people. Must not know links, tasks or
clocks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.machine.addresses import is_loopback, is_scoped
from shardnet.errors import RemoteProtocolError, UsageError
from shardnet.transport.address import host_of, split_address
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages.membership import KnownPeer

MDNS: Final = "mdns"
NAMED: Final = "named"
TAILNET: Final = "tailnet"
"""Sources of reports besides node ids: an mDNS record, a person (--peer), and that a node has
answered on a machine of the tailnet."""

MAX_KNOWN: Final = 256
"""Largest number of nodes in the table; where it is full, members displace hearsay."""

HESITATE_S: Final = 0.5
"""Delay of the node with the larger id before its first attempt to dial the other."""

RETRY_S: Final = (0.5, 1.0, 2.0, 4.0)
"""Delays after the first failures in a row; the last one applies to all further ones."""
PATIENCE_S: Final = 600.0
"""How long an unreported node is still dialled, and an unreached one at short delays."""
SLOW_RETRY_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class KnownNode:
    """What is known of one other node.

    `reports` has the addresses by source, the latest report last. `address` is the one that has
    answered a handshake with the node's id, "" before; `rtt_s` the round trip measured there then.
    `failures` has why each other address is not used, by address. `refusal` says why the node is
    not linked to at all. One that `sleeps` has said so, and is not dialled: it dials when it wakes.
    `is_settled`: its addresses were tried since they last changed. `unreported_since`: when the
    last source retracted its report. `unreached_since`: since when it has not been reached.
    """

    node: NodeId
    name: str
    reports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    address: str = ""
    rtt_s: float | None = None
    failures: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    is_linked: bool = False
    sleeps: bool = False
    n_failed: int = 0
    next_try: float = 0.0
    is_settled: bool = False
    unreported_since: float | None = None
    unreached_since: float | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all reports, without duplicates.

        Of its record and its own report the later counts: after it has moved, the other has its old
        addresses for a while.
        """
        outdated = {self.node, MDNS} - {self._latest}
        reports = (told for source, told in self.reports.items() if source not in outdated)
        return tuple(dict.fromkeys(address for told in reports for address in told))

    @property
    def reported_by(self) -> tuple[str, ...]:
        """The sources of its addresses, none when nobody reports it any more."""
        return tuple(self.reports) if self.unreported_since is None else ()

    @property
    def announced(self) -> tuple[str, ...]:
        """The addresses that the node reports itself, else those of others."""
        return self.reports.get(self._latest) or self.addresses

    @property
    def vouched(self) -> tuple[str, ...]:
        """The addresses to pass on: the node's own report, else what members and people report.

        Its record does not count, since a stranger may have written it.
        """
        others = (told for source, told in self.reports.items() if source != MDNS)
        own = self.reports.get(self.node)
        return own or tuple(dict.fromkeys(address for told in others for address in told))

    @property
    def _latest(self) -> str:
        """The source of the later one of its record and its own report, "" without both."""
        both = [source for source in self.reports if source in (self.node, MDNS)]
        return next((source for source in reversed(both) if self.reports[source]), "")

    @property
    def is_wanted(self) -> bool:
        """Whether to try its addresses: it is not linked, or the best of them is not settled."""
        is_done = self.refusal or self.sleeps or (self.is_linked and self.is_settled)
        return not is_done and bool(self.addresses)


class PeerTable:
    """All known nodes except `own`."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._known: dict[NodeId, KnownNode] = {}

    def known(self) -> list[KnownNode]:
        """Return all nodes, sorted by name."""
        return sorted(self._known.values(), key=lambda known: (known.name, known.node))

    def get(self, node: NodeId) -> KnownNode | None:
        """Return the entry of a node, None if it is unknown."""
        return self._known.get(node)

    def owner_of(self, address: str) -> KnownNode | None:
        """Return the linked node that is announced at `address`, None unless it is exactly one.

        Ignores IPv6 scopes: they are meaningful only on the machine that wrote them.
        """
        owners = [
            known
            for known in self._known.values()
            if known.is_linked and _bare(address) in map(_bare, known.announced)
        ]
        return owners[0] if len(owners) == 1 else None

    # --- reports

    def add_report(
        self, node: NodeId, name: str, addresses: Iterable[str], *, source: str, now: float
    ) -> None:
        """Record the addresses that `source` reports of a node at the time `now` (s).

        New addresses make it due for another attempt.
        """
        known = self._entry(node, name, now, source=source)
        if known is None:
            return
        if known.unreported_since is not None:
            known.reports.clear()
        addresses, before = tuple(addresses), set(known.addresses)
        known.reports.pop(source, None)
        known.reports[source] = addresses
        known.unreported_since = None
        known.refusal = ""
        known.sleeps = known.sleeps and source != MDNS  # it has said something itself
        self._forget_refused_at(known)
        if not before.issuperset(addresses):
            known.is_settled = False
            known.n_failed = 0
            first_try = now if known.is_linked else self._first_try(node, now)
            known.next_try = min(known.next_try, first_try)

    def refuse(
        self,
        node: NodeId,
        name: str,
        addresses: Iterable[str],
        why: str,
        *,
        source: str,
        now: float,
    ) -> bool:
        """Record why a reported node must not be linked to; return whether that is kept.

        A linked node has shown that it is a member, whatever a record says.
        """
        known = self._entry(node, name, now, source=source)
        if known is None or known.is_linked:
            return False
        known.reports[source] = tuple(addresses)
        known.unreported_since = None
        known.refusal = why
        return True

    def retract(self, node: NodeId, *, source: str, now: float) -> None:
        """Record that `source` does not report a node any more, from the time `now` (s).

        The addresses of the last source stay for PATIENCE_S.
        """
        known = self._known.get(node)
        if known is None or source not in known.reports:
            return
        if len(known.reports) > 1:
            del known.reports[source]
        elif known.unreported_since is None:
            known.unreported_since = now

    def retract_others(self, nodes: Iterable[NodeId], *, source: str, now: float) -> None:
        """Retract the reports of `source` on all nodes but these."""
        reported = set(nodes)
        for known in self._known.values():
            if known.node not in reported:
                self.retract(known.node, source=source, now=now)

    # --- links and attempts

    def linked(self, node: NodeId, name: str, now: float, *, dialled_at: str) -> None:
        """Record that a control link is up since `now` (s).

        `dialled_at` is the address at which this node dialled, "" if the peer has opened it.
        """
        known = self._entry(node, name, now, source=node)
        if known is None:
            return
        known.is_linked = True
        known.sleeps = False
        known.refusal = ""
        known.unreached_since = None
        known.n_failed = 0
        if dialled_at:
            known.address = known.address or dialled_at
            if dialled_at not in known.addresses:
                self.add_report(node, name, (dialled_at,), source=NAMED, now=now)
            known.is_settled = known.is_settled or known.addresses == (dialled_at,)

    def lost(self, node: NodeId, now: float) -> None:
        """Record that the last control link has ended, and retract the reports of that node."""
        self.retract(node, source=NAMED, now=now)
        for other in self._known.values():
            self.retract(other.node, source=node, now=now)
        known = self._known.get(node)
        if known is not None:
            known.is_linked = known.is_settled = False
            known.unreached_since = now
            known.next_try = self._first_try(node, now)
            if not known.reports or known.unreported_since is not None:
                known.unreported_since = now

    def answered(
        self, node: NodeId, address: str, rtt_s: float | None, failures: Mapping[str, str]
    ) -> None:
        """Record the address in use, its round trip in seconds, and why others are not used.

        `failures` has the reason by address.
        """
        known = self._known.get(node)
        if known is not None:
            known.address, known.rtt_s = address, rtt_s
            known.failures = dict(failures)
            known.is_settled = True

    def doubt(self, node: NodeId, now: float) -> None:
        """Record that the address in use does not answer: all are due again."""
        known = self._known.get(node)
        if known is not None:
            known.is_settled = False
            known.next_try = now

    def failed(self, node: NodeId, failures: Mapping[str, str], now: float) -> None:
        """Record an attempt that failed at the time `now` (s), and schedule the next.

        `failures` has the reason by address.
        """
        known = self._known.get(node)
        if known is None:
            return
        if known.unreached_since is None:
            known.unreached_since = now
        delay_s = RETRY_S[min(known.n_failed, len(RETRY_S) - 1)]
        if now - known.unreached_since > PATIENCE_S:
            delay_s = SLOW_RETRY_S
        known.failures = dict(failures)
        if known.is_linked and not known.is_settled:  # it dialled us, and not from where it was
            known.address, known.rtt_s = "", None
        known.n_failed += 1
        known.next_try = now + delay_s

    def rouse(self, nodes: Collection[NodeId] | None, now: float) -> None:
        """Have nodes dialled that sleep, as far as is known; None for all, also those that do not.

        A node that has slept itself has heard nothing meanwhile.
        """
        for known in self._known.values():
            if nodes is None or known.node in nodes:
                known.sleeps, known.n_failed, known.next_try = False, 0, now
                known.unreported_since = None if known.unreported_since is None else now

    # --- nodes that are due

    def due(self, now: float) -> list[KnownNode]:
        """Return the nodes to dial now, and remove those unreported for PATIENCE_S.

        Those that have waited longest come first: however many do not answer, each has its turn.
        """
        for known in list(self._known.values()):
            unreported_since = known.unreported_since
            if (
                unreported_since is not None
                and not known.is_linked
                and now - unreported_since > PATIENCE_S
            ):
                del self._known[known.node]
        wanted = [k for k in self._known.values() if k.is_wanted and k.next_try <= now]
        return sorted(wanted, key=lambda known: known.next_try)

    def next_due(self) -> float | None:
        """Return when the next node is due, None without one."""
        return min((k.next_try for k in self._known.values() if k.is_wanted), default=None)

    def _entry(self, node: NodeId, name: str, now: float, *, source: str) -> KnownNode | None:
        """Return the entry of a node that `source` names; None without room, or for this node.

        A record does not rename a linked node.
        """
        if node == self._own:
            return None
        known = self._known.get(node)
        if known is None:
            if len(self._known) >= MAX_KNOWN and not self._make_room(source):
                return None
            known = KnownNode(node=node, name=name, next_try=self._first_try(node, now))
            self._known[node] = known
        if not (known.is_linked and source == MDNS):
            known.name = name
        return known

    def _make_room(self, source: str) -> bool:
        """Forget a node in favour of one that `source` reports; return whether there was any.

        Only nodes without a link go: those that nobody reports any more, and, where `source` is
        more than a record, those known by their record alone. Of these the first to go has never
        answered, is refused, or has failed most often.
        """
        going = [
            known
            for known in self._known.values()
            if not known.is_linked
            and (not known.reported_by or (source != MDNS and known.reported_by == (MDNS,)))
        ]
        if not going:
            return False
        least = max(going, key=lambda k: (not k.address, bool(k.refusal), k.n_failed))
        del self._known[least.node]
        return True

    def _forget_refused_at(self, known: KnownNode) -> None:
        """Forget the nodes with a refusal whose addresses are all of this one now.

        It was started again, with the right key or version; its old record outlives it by minutes.
        """
        here = set(known.addresses)
        for other in list(self._known.values()):
            is_over = other.refusal and other is not known and not other.is_linked
            if is_over and other.addresses and here.issuperset(other.addresses):
                del self._known[other.node]

    def _first_try(self, node: NodeId, now: float) -> float:
        return now if self._own < node else now + HESITATE_S


def _bare(address: str) -> str:
    """Return an address without its IPv6 scope."""
    return re.sub(r"%[^\]]*", "", address)


def entry_for(node: NodeId, name: str, addresses: Iterable[str], *, reader_at: str) -> KnownPeer:
    """Make the entry of a node for the peer at the address `reader_at`.

    Leaves out link-local `addresses`, loopback ones if the peer is on another machine, and those
    beyond MAX_PEER_ADDRESSES.
    """
    same_machine = is_loopback(host_of(reader_at))
    hosts = ((address, host_of(address)) for address in addresses)
    good = [a for a, h in hosts if not is_scoped(h) and (same_machine or not is_loopback(h))]
    return KnownPeer(node=node, name=name, addresses=good[:MAX_PEER_ADDRESSES])


def usable_addresses(entry: KnownPeer, *, sender: str, sender_at: str) -> Sequence[str]:
    """Return the addresses of an entry that are meaningful on this machine.

    `sender` is the peer's name, `sender_at` its address. Raises RemoteProtocolError, which names
    the sender, if one is not host:port.
    """
    same_machine = is_loopback(host_of(sender_at))
    good = []
    for address in entry.addresses:
        try:
            host, _ = split_address(address)
        except UsageError as error:
            raise RemoteProtocolError(f"{sender} reported an unusable address: {error}") from error
        if not is_scoped(host) and (same_machine or not is_loopback(host)):
            good.append(address)
    return good
