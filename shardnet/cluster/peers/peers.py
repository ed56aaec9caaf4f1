"""The peers of this node: found, linked to, kept while they live, told about.

Knows candidates, their addresses and when to dial whom; the links that are up are
peers/peer_links.py's. Liveness comes from these links alone. Must not know models or rings, nor how
candidates are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.machine.addresses import LocalAddress, dial_order
from shardnet.cluster.peers.control_link import ControlLink, Handler
from shardnet.cluster.peers.peer_links import PeerLink, PeerLinks
from shardnet.cluster.peers.peer_news import believed, told_of
from shardnet.cluster.peers.peer_table import MDNS, KnownNode, PeerTable
from shardnet.cluster.peers.rtt_probe import DialAsClient, ProbeAnswer, compare
from shardnet.errors import LinkError, ShardnetError, UsageError
from shardnet.transport.address import host_of
from shardnet.transport.link import Link
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages.membership import PeersKnown

MAX_VISITS: Final = 8
"""Nodes whose addresses are tried at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """How long things take, in seconds.

    `redial_s`: from losing a named peer to dialling it again. `compare_s`: how long other addresses
    of a node may still answer when one has. `retire_s`: how long a link that is not needed stays
    open at least. `ping_s`: between measurements of the round trip. `gather_s`: how long news are
    gathered before peers are told.
    """

    redial_s: float = 2.0
    compare_s: float = 0.25
    retire_s: float = 1.0
    ping_s: float = 10.0
    gather_s: float = 0.05


DialControl = Callable[[str], Awaitable[Link]]
"""Opens a control link to an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What this node knows of another one, for people.

    `address` is the one used, `rtt_s` the round trip on the control link, None before it is
    measured. `told_by` names the sources, `failures` why other addresses are not used, by address;
    `refusal` why the node is not linked to.
    """

    node: NodeId
    name: str
    is_linked: bool
    address: str
    rtt_s: float | None
    addresses: tuple[str, ...]
    told_by: tuple[str, ...]
    failures: dict[str, str]
    refusal: str


class Peers:
    """Keeps control links. Runs their readers in `tasks`, a group that outlives them.

    `dial` opens a control link as a node, `dial_as_client` one as a client, to see who answers.
    `own_hosts` and `own_addresses` give this machine's addresses as they are now and those to
    tell others.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        name: str,
        dial: DialControl,
        dial_as_client: DialAsClient,
        handler: Handler,
        tasks: asyncio.TaskGroup,
        own_hosts: Callable[[], Sequence[LocalAddress]],
        own_addresses: Callable[[], Sequence[str]],
        log: Callable[[str], None],
        times: PeerTimes | None = None,
    ) -> None:
        self._node = node
        self._name = name
        self._dial = dial
        self._dial_as_client = dial_as_client
        self._tasks = tasks
        self._own_hosts = own_hosts
        self._own_addresses = own_addresses
        self._log = log
        self._times = times or PeerTimes()
        self._table = PeerTable(node)
        self.links = PeerLinks(
            node=node,
            handler=handler,
            tasks=tasks,
            retire_s=self._times.retire_s,
            ping_s=self._times.ping_s,
            log=log,
            on_gone=self._gone,
        )
        """The links that are up."""
        self._node_at: dict[str, NodeId] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self.unreached: dict[str, ShardnetError] = {}
        """Why there is no link to named peers, by the address that was named."""
        self._visiting: set[NodeId] = set()
        self._changed = asyncio.Event()
        self._news = asyncio.Event()

    # --- who is where

    def address_of(self, node: NodeId) -> str:
        """Return the address of a node: one that has answered, else the one it has dialled from,
        else the best it is said to have; "" where none is known.
        """
        known = self._table.get(node)
        if known is None or known.address:
            return known.address if known is not None else ""
        order, control = self._order(known.announced), self.links.link_of(node)
        seen = host_of(control.link.peer_address) if control is not None else ""
        return next((a for a in order if host_of(a) == seen), order[0] if order else "")

    async def dial_by(self, address: str, dial: Callable[[str], Awaitable[Link]]) -> Link:
        """Open a link with `dial` to the node that others have at `address`.

        That is where it has answered this node, if that is known; else, and where that fails, at
        `address` itself. Raises what `dial` raises there.
        """
        known = self._table.owner_of(address)
        if known is not None and known.address not in ("", address):
            try:
                return await dial(known.address)
            except ShardnetError:
                self._table.doubt(known.node, time.monotonic())
                self._changed.set()
        return await dial(address)

    def report(self) -> list[PeerReport]:
        """Return everything known of every other node, by name."""
        return [
            PeerReport(
                node=known.node,
                name=known.name,
                is_linked=known.is_linked,
                address=known.address,
                rtt_s=self.links.rtt_s(known.node) or known.rtt_s,
                addresses=self._order(known.addresses),
                told_by=tuple(known.told) if known.lonely_since is None else (),
                failures=dict(known.failures),
                refusal=known.refusal,
            )
            for known in self._table.known()
        ]

    # --- links by address

    async def find(self, address: str) -> ControlLink | None:
        """Return the control link to the node at `address`, dialling it if there is none.

        Returns None when this node itself answers there. Raises what dialling raises.
        """
        async with self._dialling.setdefault(address, asyncio.Lock()):
            node = self._node_at.get(address)
            linked = self.links.link_of(node) if node is not None else None
            if linked is not None:
                return linked
            link = await self._dial(address)
            node = self._node_at[address] = NodeId(link.peer.node)
            if node == self._node:
                await link.close()
                return None
            return self._link_up(link, dialled_at=address)

    async def link_to(self, address: str) -> ControlLink:
        """Return the control link to another node as `find` does; UsageError if it is this one."""
        control = await self.find(address)
        if control is None:
            raise UsageError(f"{address} is this node itself", remedy="name another one")
        return control

    def adopt(self, link: Link) -> None:
        """Serve a control link that a peer has opened, in a task of its own.

        Raises LinkError when this node has as many peers as it may have.
        """
        if link.peer.node == self._node:  # we have dialled ourselves, and the other end knows it
            self._tasks.create_task(link.close())
        else:
            self._link_up(link, dialled_at="")

    async def keep(self, address: str) -> None:
        """Keep a link to `address` for ever: dial, wait for its end, dial again."""
        while True:
            try:
                control = await self.find(address)
                if control is None:
                    self._log(f"peer {address}: that is this node itself; it is left out")
                    return
                self.unreached.pop(address, None)
                await self._lost(control)
            except ShardnetError as error:
                if str(error) != str(self.unreached.get(address)):
                    self._log(
                        f"peer {address}: {error}; trying again every {self._times.redial_s:g} s"
                    )
                self.unreached[address] = error
            await asyncio.sleep(self._times.redial_s)

    # --- what is heard of others

    def propose(self, node: NodeId, name: str, addresses: Iterable[str], refusal: str = "") -> None:
        """Take a candidate that discovery has found, with why it must not be linked to, if so."""
        now = time.monotonic()
        if refusal:
            if self._table.refuse(node, name, addresses, refusal, source=MDNS, now=now):
                self._log(f"node {name} ({', '.join(addresses)}) is left out: {refusal}")
        else:
            self._table.tell(node, name, addresses, source=MDNS, now=now)
        self._changed.set()

    def withdraw(self, node: NodeId) -> None:
        """Record that discovery tells of a node no more. A link that lives is left alone."""
        self._table.retract(node, source=MDNS, now=time.monotonic())

    def heard(self, control: ControlLink, message: PeersKnown) -> None:
        """Take in what a peer tells of itself and its peers. Raises RemoteProtocolError if it lies
        about what an address is.
        """
        now, teller = time.monotonic(), NodeId(control.link.peer.node)
        for peer in message.peers:
            addresses = believed(
                peer, teller=control.peer_name, teller_at=control.link.peer_address
            )
            self._table.tell(NodeId(peer.node), peer.name, addresses, source=teller, now=now)
        told = [NodeId(peer.node) for peer in message.peers]
        self._table.keep_only(told, source=teller, now=now)
        self._changed.set()
        self._news.set()

    def addresses_changed(self) -> None:
        """Tell the peers this node's addresses again."""
        self._news.set()

    # --- at work

    async def run(self, named: Iterable[str]) -> None:
        """Keep links to the `named` addresses and to every candidate, and tell peers of peers."""
        async with asyncio.TaskGroup() as tasks:
            for address in named:
                tasks.create_task(self.keep(address))
            tasks.create_task(self._tell_news())
            await self._visit_all(tasks)

    async def close(self) -> None:
        """Say goodbye on every link."""
        await self.links.close()

    async def _visit_all(self, tasks: asyncio.TaskGroup) -> None:
        """Try whoever is due, for ever."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            for known in self._table.due(now):
                room = not self.links.is_full or known.is_linked
                if known.node in self._visiting or len(self._visiting) >= MAX_VISITS or not room:
                    continue
                self._visiting.add(known.node)
                tasks.create_task(self._visit(known))
            next_due = self._table.next_due()
            wait_s = max(0.05, next_due - now) if next_due is not None else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _visit(self, known: KnownNode) -> None:
        """Try the addresses of a node, and link to it at the best if it is not linked."""
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
        """Return where a node answers best, and why its other addresses are not used.

        What others say of it, or a person named, counts where it answers at none of its own.
        """
        failures: dict[str, str] = {}
        announced = known.announced
        rest = [address for address in known.addresses if address not in announced]
        for addresses in (announced, rest):
            result = await compare(
                known.node,
                self._order(addresses)[:MAX_PEER_ADDRESSES],
                self._dial_as_client,
                grace_s=self._times.compare_s,
            )
            failures |= result.failures
            if result.best is not None:
                return result.best, failures
        return None, failures

    async def _open(self, known: KnownNode, address: str) -> None:
        try:
            link = await self._dial(address)
        except ShardnetError as error:
            self._table.failed(known.node, {address: str(error)}, time.monotonic())
            return
        with contextlib.suppress(LinkError):  # too many peers by now
            self._link_up(link, dialled_at=address)

    def _order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Put a node's addresses into the order in which to try them."""
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            by_host.setdefault(host_of(address), []).append(address)
        return tuple(a for host in dial_order(by_host, self._own_hosts()) for a in by_host[host])

    async def _lost(self, control: ControlLink) -> None:
        """Wait until the node of `control` is lost."""
        lost = asyncio.Event()
        self.links.watch(control, lambda _: lost.set())
        await lost.wait()

    def _link_up(self, link: Link, *, dialled_at: str) -> ControlLink:
        """Begin to serve a link; return the one to use for the peer. Raises as PeerLinks.up."""
        control = self.links.up(link, dialled_at=dialled_at)
        self._table.linked(
            NodeId(link.peer.node), link.peer.name, time.monotonic(), dialled_at=dialled_at
        )
        self._news.set()
        self._changed.set()
        return control

    def _gone(self, node: NodeId) -> None:
        """Record that no link to a node is left."""
        self._table.lost(node, time.monotonic())
        self._news.set()
        self._changed.set()

    # --- telling

    async def _tell_news(self) -> None:
        """Tell every peer of all peers, when that has changed."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._times.gather_s)
            self._news.clear()
            for peer_link in self.links.in_use().values():
                self._tell(peer_link)

    def _tell(self, peer_link: PeerLink) -> None:
        reader_at = peer_link.control.link.peer_address
        told = [told_of(self._node, self._name, self._own_addresses(), reader_at=reader_at)]
        for node in self.links.in_use():
            known = self._table.get(node)
            if known is not None and node != peer_link.control.link.peer.node:
                told.append(told_of(node, known.name, known.announced, reader_at=reader_at))
        message = PeersKnown(peers=told)
        if message != peer_link.told and not peer_link.control.link.closed:
            peer_link.told = message
            peer_link.control.send(message)
