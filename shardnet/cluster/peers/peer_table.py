"""The book of peers: who is known from where, at which addresses, and whom to try next.

A pure state machine: it takes what was heard, tried and measured, with the time, and answers who is
due. It keeps why a node was not reached, for people. Must not know links, tasks or clocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardnet.types import NodeId

MDNS: Final = "mdns"
NAMED: Final = "named"
"""Sources beside other nodes, which go by their ids: a record, and what a person wrote."""

MAX_KNOWN: Final = 256
"""Nodes that the book holds; others are not taken in."""

HESITATE_S: Final = 0.5
"""How long the node with the larger id leaves the first attempt to the other one."""

RETRY_S: Final = (0.5, 1.0, 2.0, 4.0)
"""Waits after the first failures in a row; the last one counts for more."""
PATIENCE_S: Final = 600.0
"""How long a node that nobody tells of any more is tried, and others in quick succession."""
SLOW_RETRY_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class KnownNode:
    """What is known of one other node.

    `told` has the addresses by who told them. `address` is the one that has answered a handshake
    with the node's id, "" before; `rtt_s` the round trip measured there then. `failures` has why
    each other address is not used, by address. `refusal` says why the node is not linked to at all.
    `is_settled` says that its addresses were tried since they last changed, `lonely_since` when the
    last one who told of it took that back, `unreached_since` since when it is looked for.
    """

    node: NodeId
    name: str
    told: dict[str, tuple[str, ...]] = field(default_factory=dict)
    address: str = ""
    rtt_s: float | None = None
    failures: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    is_linked: bool = False
    n_failed: int = 0
    next_try: float = 0.0
    is_settled: bool = False
    lonely_since: float | None = None
    unreached_since: float | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address that anyone told, once."""
        return tuple(dict.fromkeys(address for told in self.told.values() for address in told))

    @property
    def announced(self) -> tuple[str, ...]:
        """What the node says of itself, else what others say."""
        return self.told.get(self.node) or self.told.get(MDNS) or self.addresses

    @property
    def is_wanted(self) -> bool:
        """Whether to try its addresses: it is not linked, or the best of them is not settled."""
        return not (self.refusal or (self.is_linked and self.is_settled)) and bool(self.addresses)


class PeerTable:
    """All nodes known beside `own`."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._known: dict[NodeId, KnownNode] = {}

    def known(self) -> list[KnownNode]:
        """Return all, by name."""
        return sorted(self._known.values(), key=lambda known: (known.name, known.node))

    def get(self, node: NodeId) -> KnownNode | None:
        """Return what is known of one node."""
        return self._known.get(node)

    def owner_of(self, address: str) -> KnownNode | None:
        """Return the linked node that is announced at `address`, None where it is not just one.

        IPv6 scopes are left out: they mean something on the machine that wrote them alone.
        """
        owners = [
            known
            for known in self._known.values()
            if known.is_linked and _bare(address) in map(_bare, known.announced)
        ]
        return owners[0] if len(owners) == 1 else None

    # --- what is heard

    def tell(
        self, node: NodeId, name: str, addresses: Iterable[str], *, source: str, now: float
    ) -> None:
        """Note what `source` tells of a node. News make it worth another attempt."""
        known = self._entry(node, name, now)
        if known is None:
            return
        if known.lonely_since is not None:
            known.told.clear()
        addresses, before = tuple(addresses), set(known.addresses)
        known.told[source] = addresses
        known.lonely_since = None
        known.refusal = ""
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
        """Note a node that is not linked to, and why. Returns whether that is new."""
        known = self._entry(node, name, now)
        if known is None:
            return False
        is_new = known.refusal != why
        known.told[source] = tuple(addresses)
        known.lonely_since = None
        known.refusal = why
        return is_new

    def retract(self, node: NodeId, *, source: str, now: float) -> None:
        """Note that `source` tells of a node no more. The last addresses are kept for a while."""
        known = self._known.get(node)
        if known is None or source not in known.told:
            return
        if len(known.told) > 1:
            del known.told[source]
        elif known.lonely_since is None:
            known.lonely_since = now

    def keep_only(self, nodes: Iterable[NodeId], *, source: str, now: float) -> None:
        """Note that `source` tells of these nodes and of no others."""
        kept = set(nodes)
        for known in self._known.values():
            if known.node not in kept:
                self.retract(known.node, source=source, now=now)

    # --- what happened

    def linked(self, node: NodeId, name: str, now: float, *, dialled_at: str) -> None:
        """Note that a control link is up; `dialled_at` is "" where the peer has opened it."""
        known = self._entry(node, name, now)
        if known is None:
            return
        known.is_linked = True
        known.refusal = ""
        known.unreached_since = None
        known.n_failed = 0
        if dialled_at:
            known.address = known.address or dialled_at
            if dialled_at not in known.addresses:
                self.tell(node, name, (dialled_at,), source=NAMED, now=now)
            known.is_settled = known.is_settled or known.addresses == (dialled_at,)

    def lost(self, node: NodeId, now: float) -> None:
        """Note that the last control link has ended. What the node told is no news any more."""
        self.retract(node, source=NAMED, now=now)
        for other in self._known.values():
            self.retract(other.node, source=node, now=now)
        known = self._known.get(node)
        if known is not None:
            known.is_linked = known.is_settled = False
            known.unreached_since = now
            known.next_try = self._first_try(node, now)
            if not known.told or known.lonely_since is not None:
                known.lonely_since = now

    def answered(
        self, node: NodeId, address: str, rtt_s: float | None, failures: Mapping[str, str]
    ) -> None:
        """Note that the node answered at `address`, and why its others are not used."""
        known = self._known.get(node)
        if known is not None:
            known.address, known.rtt_s = address, rtt_s
            known.failures = dict(failures)
            known.is_settled = True

    def doubt(self, node: NodeId, now: float) -> None:
        """Note that the address that is used does not answer: all are to be tried again."""
        known = self._known.get(node)
        if known is not None:
            known.is_settled = False
            known.next_try = now

    def failed(self, node: NodeId, failures: Mapping[str, str], now: float) -> None:
        """Note that an attempt reached the node nowhere, and why; set the time of the next."""
        known = self._known.get(node)
        if known is None:
            return
        if known.unreached_since is None:
            known.unreached_since = now
        delay_s = RETRY_S[min(known.n_failed, len(RETRY_S) - 1)]
        if now - known.unreached_since > PATIENCE_S:
            delay_s = SLOW_RETRY_S
        known.failures = dict(failures)
        known.n_failed += 1
        known.next_try = now + delay_s

    # --- whom to try

    def due(self, now: float) -> list[KnownNode]:
        """Return the nodes to try now, and forget those that nobody tells of any more."""
        for known in list(self._known.values()):
            lonely = known.lonely_since
            if lonely is not None and not known.is_linked and now - lonely > PATIENCE_S:
                del self._known[known.node]
        return [k for k in self._known.values() if k.is_wanted and k.next_try <= now]

    def next_due(self) -> float | None:
        """Return when the next node is due."""
        return min((k.next_try for k in self._known.values() if k.is_wanted), default=None)

    def _entry(self, node: NodeId, name: str, now: float) -> KnownNode | None:
        if node == self._own:
            return None
        known = self._known.get(node)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                return None
            known = KnownNode(node=node, name=name, next_try=self._first_try(node, now))
            self._known[node] = known
        known.name = name
        return known

    def _first_try(self, node: NodeId, now: float) -> float:
        return now if self._own < node else now + HESITATE_S


def _bare(address: str) -> str:
    """Return an address without its IPv6 scope."""
    return re.sub(r"%[^\]]*", "", address)
