"""The peers of this node: dial the nodes found, keep their links up, exchange known peers.

Knows the nodes found, their addresses and when to dial them; peer_links.py has the links that are
up. Liveness comes from these links alone. Must not know models or rings, nor how discovery works.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakValueDictionary

from msgspec import structs

from shardnet.cluster.machine.addresses import LocalAddress, dial_order
from shardnet.cluster.peers.control_link import ControlLink, Handler
from shardnet.cluster.peers.peer_links import PeerLink, PeerLinks
from shardnet.cluster.peers.peer_table import (
    MDNS,
    KnownNode,
    PeerTable,
    entry_for,
    usable_addresses,
)
from shardnet.cluster.peers.rtt_probe import DialAsClient, ProbeAnswer, compare
from shardnet.cluster.peers.sleepers import Sleepers
from shardnet.errors import LinkError, ShardnetError, UsageError
from shardnet.transport.address import host_of
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.membership import NodeInfo, PeersKnown

MAX_VISITS: Final = 8
"""Nodes dialled at one time."""
MAX_LEFT_OUT: Final = 32
"""Largest number of nodes of which the log says that they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """Delays and intervals, in seconds.

    `redial_s`: between losing and redialling a named peer. `compare_s`: how long other addresses of
    a node may still answer when one has. `retire_s`: how long a link that is not needed stays open
    at least. `ping_s`: between measurements of the round trip. `gather_s`: how long changes are
    gathered before they are sent to peers.
    """

    redial_s: float = 2.0
    compare_s: float = 0.25
    retire_s: float = 1.0
    ping_s: float = 10.0
    gather_s: float = 0.05


DialControl = Callable[[str], Awaitable[Link]]
"""Opens a control link to an address."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Dialling:
    """The callers that want one address dialled: one dials, the others wait for what comes of it.

    `n_failed` and `error`: how often it failed while any of them waited, and why last.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_failed: int = 0
    error: ShardnetError | None = None


def _again(error: ShardnetError) -> ShardnetError:
    """Make an equal error, without the frames that the first one holds."""
    same = type(error)(error.message, remedy=error.remedy)
    same.__cause__ = error.__cause__
    return same


@dataclass(kw_only=True, eq=False, repr=False)
class Peers:
    """Keeps control links up. Runs their readers in `tasks`, a group that outlives them.

    `dial` opens a control link as a node, `dial_as_client` one as a client, for probes. `handler`
    handles the messages of all links. `own_hosts` returns this machine's addresses now,
    `own_addresses` those to advertise. `log` takes lines for people, `on_member` the hosts of nodes
    that are linked or report themselves, `on_named` the addresses that a person named and where a
    node answers. `rests` returns why this node takes no layers now, ""
    while it does, `is_present` whether a link was opened with the cluster's present key.
    `sleepers` are the nodes that sleep.
    """

    node: NodeId
    name: str
    dial: DialControl
    dial_as_client: DialAsClient
    handler: Handler
    tasks: asyncio.TaskGroup
    own_hosts: Callable[[], Sequence[LocalAddress]]
    own_addresses: Callable[[], Sequence[str]]
    log: Callable[[str], None]
    sleepers: Sleepers
    on_member: Callable[[str], None] = lambda host: None
    on_named: Callable[[str], None] = lambda address: None
    rests: Callable[[], str] = lambda: ""
    is_present: Callable[[Link], bool] = lambda link: True
    times: PeerTimes = PeerTimes()

    def __post_init__(self) -> None:
        self._resting: set[NodeId] = set()
        """Nodes that take no layers now."""
        self.sleeps = False
        """Whether this node is about to sleep: it dials nobody, and takes no link."""
        self.woke_s = 0.0
        """How long this node took to wake, as the one has said that woke it last."""
        self.sleepers.on_waking = self._rouse
        self._table = PeerTable(self.node)
        self.links = PeerLinks(
            node=self.node,
            handler=self.handler,
            tasks=self.tasks,
            retire_s=self.times.retire_s,
            ping_s=self.times.ping_s,
            log=self.log,
            on_gone=self._gone,
            dial_again=self._dial_again,
            is_present=self.is_present,
        )
        """The links that are up."""
        self._node_at: dict[str, NodeId] = {}
        self._dialling: WeakValueDictionary[str, _Dialling] = WeakValueDictionary()
        self.unreached: dict[str, ShardnetError] = {}
        """Why there is no link to named peers, by the address that was named."""
        self._left_out: set[NodeId] = set()
        """Nodes of which the log says that they are left out, for whatever reason they had first:
        strangers choose the words."""
        self._visiting: set[NodeId] = set()
        self._changed = asyncio.Event()
        self._news = asyncio.Event()

    # --- addresses of nodes

    def address_of(self, node: NodeId) -> str:
        """Return the best known address of a node, "" if none is known.

        That is one that has answered, else the one it has dialled from, else the best reported.
        """
        known = self._table.get(node)
        if known is None or known.address:
            return known.address if known is not None else ""
        order, control = self.order(known.announced), self.links.link_of(node)
        seen = host_of(control.link.peer_address) if control is not None else ""
        return next((a for a in order if host_of(a) == seen), order[0] if order else "")

    async def dial_by(self, address: str, dial: Callable[[str], Awaitable[Link]]) -> Link:
        """Open a link with `dial` to the node announced at `address`.

        Dials the address at which it has answered this node, if one is known; else, or if that
        fails, `address` itself. Raises as `dial` there.
        """
        known = self._table.owner_of(address)
        if known is not None and known.address not in ("", address):
            try:
                return await dial(known.address)
            except ShardnetError:
                self._table.doubt(known.node, time.monotonic())
                self._changed.set()
        return await dial(address)

    def known(self) -> list[KnownNode]:
        """Return what is known of every other node now, sorted by name."""
        return [
            replace(
                known,
                rtt_s=self.links.rtt_s(known.node) or known.rtt_s,
                failures=dict(known.failures),
            )
            for known in self._table.known()
        ]

    # --- links by address

    async def find(self, address: str) -> ControlLink | None:
        """Return the control link to the node at `address`, dialling it if there is none.

        Several callers at one time share what comes of it. Returns None if this node itself answers
        there. Raises as `dial`.
        """
        dialling = self._dialling.setdefault(address, _Dialling())
        n_failed = dialling.n_failed
        async with dialling.lock:
            linked = self._linked_at(address)
            if linked is not None:
                return linked
            if dialling.error is not None and dialling.n_failed > n_failed:
                raise _again(dialling.error)
            try:
                link = await self.dial(address)
            except ShardnetError as error:
                dialling.error = _again(error)
                dialling.n_failed += 1
                raise
            node = self._node_at[address] = NodeId(link.peer.node)
            if node == self.node:
                await link.close()
                return None
            return self._link_up(link, dialled_at=address)

    def _linked_at(self, address: str) -> ControlLink | None:
        """Return the link to the node found at `address`, None without one, or if it may have left.

        It is still there if a link dialled there is up, or if it reports the address itself.
        """
        node = self._node_at.get(address)
        known = self._table.get(node) if node is not None else None
        if node is None or known is None:
            return None
        is_there = address in known.reports.get(node, ()) or self.links.is_dialled(node, address)
        return self.links.link_of(node) if is_there else None

    async def link_to(self, address: str) -> ControlLink:
        """Return the control link to another node as `find`; raise UsageError if it is this one."""
        control = await self.find(address)
        if control is None:
            raise UsageError(f"{address} is this node itself", remedy="name another one")
        return control

    def adopt(self, link: Link) -> None:
        """Serve a control link that a peer has opened, in a task of its own.

        Raises LinkError if this node has MAX_PEERS peers already.
        """
        if link.peer.node == self.node:  # this node dialled itself; the other end handles it
            self.tasks.create_task(link.close())
        else:
            self._link_up(link, dialled_at="")

    async def keep(self, address: str) -> None:
        """Keep a link to `address` up until cancelled: dial, wait for its end, dial again."""
        while True:
            known = self._table.get(self._node_at.get(address, self.node))
            if self.sleeps or (known is not None and known.sleeps):
                await asyncio.sleep(self.times.redial_s)
                continue
            try:
                control = await self.find(address)
                if control is None:
                    self.log(f"peer {address}: that is this node itself; it is left out")
                    return
                self.unreached.pop(address, None)
                self.on_named(address)
                await self._lost(control)
            except ShardnetError as error:
                if str(error) != str(self.unreached.get(address)):
                    self.log(
                        f"peer {address}: {error}; trying again every {self.times.redial_s:g} s"
                    )
                self.unreached[address] = error
            await asyncio.sleep(self.times.redial_s)

    # --- reports of other nodes

    def propose(
        self,
        node: NodeId,
        name: str,
        addresses: Iterable[str],
        refusal: str = "",
        *,
        source: str = MDNS,
    ) -> None:
        """Add a node that `source` found; `refusal` says why it must not be linked to, if so."""
        now = time.monotonic()
        if refusal:
            if self._table.refuse(node, name, addresses, refusal, source=source, now=now):
                self._log_refusal(
                    node, f"node {name} ({', '.join(addresses)}) is left out: {refusal}"
                )
        else:
            self._table.add_report(node, name, addresses, source=source, now=now)
        self._changed.set()

    def _log_refusal(self, node: NodeId, line: str) -> None:
        """Log that a node is left out, once for each node, and of so many nodes alone."""
        if node not in self._left_out and len(self._left_out) < MAX_LEFT_OUT:
            self._left_out.add(node)
            self.log(line)

    def withdraw(self, node: NodeId) -> None:
        """Record that discovery does not report a node any more. A link that lives stays."""
        self._table.retract(node, source=MDNS, now=time.monotonic())

    def withdraw_others(self, nodes: Iterable[NodeId], *, source: str) -> None:
        """Record that `source` reports no nodes but these."""
        self._table.retract_others(nodes, source=source, now=time.monotonic())

    def heard(self, control: ControlLink, message: PeersKnown) -> None:
        """Record what a peer reports of itself and its peers.

        Raises RemoteProtocolError if an address is not host:port.
        """
        now, sender = time.monotonic(), NodeId(control.link.peer.node)
        for peer in message.peers:
            addresses = usable_addresses(
                peer, sender=control.peer_name, sender_at=control.link.peer_address
            )
            self._table.add_report(NodeId(peer.node), peer.name, addresses, source=sender, now=now)
        self.woke_s = message.woke_s or self.woke_s
        if (told := message.sleeps) is not None and told.node == sender and told.asleep is not None:
            address = self.address_of(sender) or told.address
            self.sleepers.fell_asleep(structs.replace(told, address=address))
            if (known := self._table.get(sender)) is not None:
                known.sleeps = True
        if message.rests:
            self._resting.add(sender)
        else:
            self._resting.discard(sender)
        reported = [NodeId(peer.node) for peer in message.peers]
        self._table.retract_others(reported, source=sender, now=now)
        self._is_member(control.link)
        self._changed.set()
        self._news.set()

    def ready(self) -> list[NodeId]:
        """Return the linked nodes that may take layers now."""
        linked = (NodeId(control.link.peer.node) for control in self.links.linked())
        return [node for node in linked if node not in self._resting]

    def rest_changed(self) -> None:
        """Tell the peers that this node rests, or does not any more."""
        self._news.set()

    def addresses_changed(self) -> None:
        """Send this node's changed addresses to the peers."""
        self._news.set()

    async def fall_asleep(self, info: NodeInfo) -> None:
        """Tell the peers that this node sleeps, as `info` says, and leave them; dial nobody."""
        self.sleeps = True
        for peer_link in self.links.in_use().values():
            self._send_known_peers(peer_link, info)
        await self.links.leave()

    def wake(self) -> None:
        """Dial all nodes again."""
        self.sleeps = False
        self._rouse(None)

    def _rouse(self, nodes: Collection[NodeId] | None) -> None:
        """Dial nodes that sleep, as far as is known; None for all."""
        self._table.rouse(nodes, time.monotonic())
        self._changed.set()

    # --- tasks

    async def run(self, named: Iterable[str]) -> None:
        """Keep links to the `named` addresses and all nodes found; exchange known peers."""
        async with asyncio.TaskGroup() as tasks:
            for address in named:
                tasks.create_task(self.keep(address))
            tasks.create_task(self.sleepers.load())
            tasks.create_task(self._send_news())
            await self._visit_all(tasks)

    async def close(self) -> None:
        """Close every link."""
        await self.links.close()

    async def _visit_all(self, tasks: asyncio.TaskGroup) -> None:
        """Dial the nodes that are due, until cancelled."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            for known in () if self.sleeps else self._table.due(now):
                room = not self.links.is_full or known.is_linked
                if known.node in self._visiting or len(self._visiting) >= MAX_VISITS or not room:
                    continue
                self._visiting.add(known.node)
                tasks.create_task(self._visit(known))
            next_due = None if self.sleeps else self._table.next_due()
            wait_s = max(0.05, next_due - now) if next_due is not None else None
            async with at_most(wait_s):
                await self._changed.wait()

    async def _visit(self, known: KnownNode) -> None:
        """Probe the addresses of a node, and link to it at the best one if it is not linked."""
        try:
            best, failures = await self._best_address(known)
            if best is None:
                self._table.failed(known.node, failures, time.monotonic())
            else:
                self._table.answered(known.node, best.address, best.rtt_s, failures)
                if known.node not in self.links:
                    await self._open(known, best.address)
        finally:
            self._visiting.discard(known.node)
            self._changed.set()

    async def _best_address(self, known: KnownNode) -> tuple[ProbeAnswer | None, dict[str, str]]:
        """Return the best answer of a node, and why its other addresses are not used.

        Addresses from others, or from a person, are tried if it answers at none of its own.
        """
        failures: dict[str, str] = {}
        announced = known.announced
        rest = [address for address in known.addresses if address not in announced]
        for addresses in (announced, rest):
            result = await compare(
                known.node,
                self.order(addresses)[:MAX_PEER_ADDRESSES],
                self.dial_as_client,
                grace_s=self.times.compare_s,
            )
            failures |= result.failures
            if result.best is not None:
                return result.best, failures
        return None, failures

    async def _open(self, known: KnownNode, address: str) -> None:
        try:
            link = await self.dial(address)
        except ShardnetError as error:
            self._table.failed(known.node, {address: str(error)}, time.monotonic())
            return
        with contextlib.suppress(LinkError):  # too many peers by now
            self._link_up(link, dialled_at=address)

    async def _dial_again(self, node: NodeId) -> None:
        """Open another link to a node whose last one broke. Raises as `dial`, and as `_link_up`."""
        address = self.address_of(node)
        if not address:
            raise LinkError("no address of that node is known")
        self._link_up(await self.dial(address), dialled_at=address)

    def order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Sort a node's addresses into the order in which to dial them."""
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            by_host.setdefault(host_of(address), []).append(address)
        return tuple(a for host in dial_order(by_host, self.own_hosts()) for a in by_host[host])

    async def _lost(self, control: ControlLink) -> None:
        """Wait until the node of `control` is lost."""
        lost = asyncio.Event()
        self.links.watch(control, lambda _: lost.set())
        await lost.wait()

    def _link_up(self, link: Link, *, dialled_at: str) -> ControlLink:
        """Begin to serve a link; return the link to use for the peer. Raises as PeerLinks.up."""
        control = self.links.up(link, dialled_at=dialled_at)
        self._table.linked(
            NodeId(link.peer.node), link.peer.name, time.monotonic(), dialled_at=dialled_at
        )
        self.sleepers.woke(NodeId(link.peer.node), link.peer.name)
        self._is_member(link)
        self._news.set()
        self._changed.set()
        return control

    def _is_member(self, link: Link) -> None:
        """Report all hosts of a linked node: it may have been refused at another one before."""
        known = self._table.get(NodeId(link.peer.node))
        addresses = known.addresses if known is not None else ()
        for host in {host_of(address) for address in (link.peer_address, *addresses)}:
            self.on_member(host)

    def _gone(self, node: NodeId) -> None:
        """Record that no link to a node is left."""
        self._resting.discard(node)
        self._table.lost(node, time.monotonic())
        self._news.set()
        self._changed.set()

    # --- sending

    async def _send_news(self) -> None:
        """Send the known peers to every peer whenever they change."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self.times.gather_s)
            self._news.clear()
            for peer_link in self.links.in_use().values():
                self._send_known_peers(peer_link)

    def _send_known_peers(self, peer_link: PeerLink, sleeps: NodeInfo | None = None) -> None:
        reader_at = peer_link.control.link.peer_address
        entries = [entry_for(self.node, self.name, self.own_addresses(), reader_at=reader_at)]
        for node in self.links.in_use():
            known = self._table.get(node)
            if known is not None and node != peer_link.control.link.peer.node:
                entries.append(entry_for(node, known.name, known.vouched, reader_at=reader_at))
        message = PeersKnown(
            peers=entries,
            rests=explanation(self.rests()),
            sleeps=sleeps,
            woke_s=self.sleepers.woke_s.get(peer_link.control.link.peer.name, 0),
        )
        if message != peer_link.last_sent and not peer_link.control.link.closed:
            peer_link.last_sent = message
            peer_link.control.send(message)
