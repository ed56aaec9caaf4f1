"""The control links of this node to others: one per peer, found, kept while they live, told about.

Knows candidates, addresses and links. Liveness comes from these links alone. When two nodes dial
each other at once, both keep the link that the smaller node id has opened, and that node closes the
other one when nobody uses it. Must not know models or rings, nor how candidates are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.addresses import LocalAddress, dial_order, is_loopback, is_scoped
from shardnet.cluster.control import ControlLink, Handler
from shardnet.cluster.peer_book import MDNS, KnownNode, PeerBook
from shardnet.cluster.soundings import N_PINGS, Knock, Sounding, compare, ping
from shardnet.errors import LinkError, RemoteProtocolError, ShardnetError, UsageError
from shardnet.transport.link import Link
from shardnet.types import NodeId
from shardnet.wire.control import KnownPeer, PeersKnown
from shardnet.wire.schema import MAX_PEER_ADDRESSES

MAX_PEERS: Final = 32
"""Nodes that this one keeps a link to."""
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


def split_address(address: str) -> tuple[str, int]:
    """Read `host:port`, an IPv6 host in brackets. Raises UsageError when it is not that."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"'{address}' is not HOST:PORT")
    return host, int(port)


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Line:
    """A control link to a peer, and whether the smaller of both node ids has opened it."""

    control: ControlLink
    by_smaller: bool
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    is_retired: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    told: PeersKnown | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    """A node that is linked to: its lines, and who wants to know when the last one has ended."""

    lines: list[_Line] = field(default_factory=list)
    watchers: list[Callable[[ShardnetError], None]] = field(default_factory=list)

    @property
    def line(self) -> _Line:
        """The line that requests use: opened by the smaller id, the oldest of these."""
        return min(self.lines, key=lambda line: not line.by_smaller)


class Peers:
    """Control links by node id. Runs their readers in `tasks`, a group that outlives them.

    `dial` opens a control link as a node, `knock` one as a client, to see who answers. `own_hosts`
    and `own_addresses` give this machine's addresses as they are now and those to tell others.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        name: str,
        dial: DialControl,
        knock: Knock,
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
        self._knock = knock
        self._handler = handler
        self._tasks = tasks
        self._own_hosts = own_hosts
        self._own_addresses = own_addresses
        self._log = log
        self._times = times or PeerTimes()
        self._book = PeerBook(node)
        self._peers: dict[NodeId, _Peer] = {}
        self._node_at: dict[str, NodeId] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self.unreached: dict[str, ShardnetError] = {}
        """Why there is no link to named peers, by the address that was named."""
        self._visiting: set[NodeId] = set()
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._closing = False

    # --- what is linked

    def linked(self) -> list[ControlLink]:
        """Return the link to each peer that is up, by name of the peer."""
        controls = [peer.line.control for peer in self._peers.values()]
        return sorted(controls, key=lambda control: control.link.peer.name)

    def link_of(self, node: NodeId) -> ControlLink | None:
        """Return the link to a node, None where there is none."""
        peer = self._peers.get(node)
        return peer.line.control if peer is not None else None

    def latest(self, control: ControlLink) -> ControlLink:
        """Return the link to the same node that requests should use now, `control` if none is."""
        return self.link_of(NodeId(control.link.peer.node)) or control

    def address_of(self, node: NodeId) -> str:
        """Return the address of a node: one that has answered, else the one it has dialled from,
        else the best it is said to have; "" where none is known.
        """
        known = self._book.get(node)
        if known is None or known.address:
            return known.address if known is not None else ""
        order, control = self._order(known.announced), self.link_of(node)
        seen = _host(control.link.peer_address) if control is not None else ""
        return next((a for a in order if _host(a) == seen), order[0] if order else "")

    async def dial_by(self, address: str, dial: Callable[[str], Awaitable[Link]]) -> Link:
        """Open a link with `dial` to the node that others have at `address`.

        That is where it has answered this node, if that is known; else, and where that fails, at
        `address` itself. Raises what `dial` raises there.
        """
        known = self._book.owner_of(address)
        if known is not None and known.address not in ("", address):
            try:
                return await dial(known.address)
            except ShardnetError:
                self._book.doubt(known.node, time.monotonic())
                self._changed.set()
        return await dial(address)

    def rtt_s(self, node: NodeId) -> float | None:
        """Return the round trip to a linked node, the shortest of late, None before it is known."""
        peer = self._peers.get(node)
        return min(peer.line.rtts_s, default=None) if peer is not None else None

    def report(self) -> list[PeerReport]:
        """Return everything known of every other node, by name."""
        return [
            PeerReport(
                node=known.node,
                name=known.name,
                is_linked=known.is_linked,
                address=known.address,
                rtt_s=self.rtt_s(known.node) or known.rtt_s,
                addresses=self._order(known.addresses),
                told_by=tuple(known.told) if known.lonely_since is None else (),
                failures=dict(known.failures),
                refusal=known.refusal,
            )
            for known in self._book.known()
        ]

    # --- links by address

    async def find(self, address: str) -> ControlLink | None:
        """Return the control link to the node at `address`, dialling it if there is none.

        Returns None when this node itself answers there. Raises what dialling raises.
        """
        async with self._dialling.setdefault(address, asyncio.Lock()):
            node = self._node_at.get(address)
            if node is not None and node in self._peers:
                return self._peers[node].line.control
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
            raise UsageError(f"{address} is this node itself; name another one")
        return control

    def adopt(self, link: Link) -> None:
        """Serve a control link that a peer has opened, in a task of its own.

        Raises LinkError when this node has as many peers as it may have.
        """
        if link.peer.node == self._node:  # we have dialled ourselves, and the other end knows it
            self._tasks.create_task(link.close())
        else:
            self._link_up(link, dialled_at="")

    def watch(
        self, control: ControlLink, on_lost: Callable[[ShardnetError], None]
    ) -> Callable[[], None]:
        """Call `on_lost` once when the last link to the node of `control` ends.

        At once if that has happened. Returns what ends the watching.
        """
        peer = self._peers.get(NodeId(control.link.peer.node))
        if peer is None:
            on_lost(control.ended or LinkError(f"{control.peer_name}: the link has ended"))
            return lambda: None
        peer.watchers.append(on_lost)

        def stop() -> None:
            with contextlib.suppress(ValueError):  # it has been told already
                peer.watchers.remove(on_lost)

        return stop

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
            if self._book.refuse(node, name, addresses, refusal, source=MDNS, now=now):
                self._log(f"node {name} ({', '.join(addresses)}) is left out: {refusal}")
        else:
            self._book.tell(node, name, addresses, source=MDNS, now=now)
        self._changed.set()

    def withdraw(self, node: NodeId) -> None:
        """Take note that discovery tells of a node no more. A link that lives is left alone."""
        self._book.retract(node, source=MDNS, now=time.monotonic())

    def heard(self, control: ControlLink, message: PeersKnown) -> None:
        """Take in what a peer tells of itself and its peers. Raises RemoteProtocolError if it lies
        about what an address is.
        """
        now, teller = time.monotonic(), NodeId(control.link.peer.node)
        same_machine = _is_same_machine(control.link)
        for peer in message.peers:
            addresses = [a for a in peer.addresses if _is_tellable(a, same_machine, control)]
            self._book.tell(NodeId(peer.node), peer.name, addresses, source=teller, now=now)
        told = [NodeId(peer.node) for peer in message.peers]
        self._book.keep_only(told, source=teller, now=now)
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
        self._closing = True
        lines = [line for peer in self._peers.values() for line in peer.lines]
        await asyncio.gather(*(line.control.link.close() for line in lines))

    async def _visit_all(self, tasks: asyncio.TaskGroup) -> None:
        """Try whoever is due, for ever."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            for known in self._book.due(now):
                room = len(self._peers) < MAX_PEERS or known.is_linked
                if known.node in self._visiting or len(self._visiting) >= MAX_VISITS or not room:
                    continue
                self._visiting.add(known.node)
                tasks.create_task(self._visit(known))
            next_due = self._book.next_due()
            wait_s = max(0.05, next_due - now) if next_due is not None else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _visit(self, known: KnownNode) -> None:
        """Try the addresses of a node, and link to it at the best if it is not linked."""
        try:
            best, failures = await self._best_address(known)
            if best is None:
                self._book.failed(known.node, failures, time.monotonic())
            else:
                self._book.answered(known.node, best.address, best.rtt_s, failures)
                if known.node not in self._peers:
                    await self._open(known, best.address)
        finally:
            self._visiting.discard(known.node)
            self._changed.set()

    async def _best_address(self, known: KnownNode) -> tuple[Sounding | None, dict[str, str]]:
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
                self._knock,
                patience_s=self._times.compare_s,
            )
            failures |= result.failures
            if result.best is not None:
                return result.best, failures
        return None, failures

    async def _open(self, known: KnownNode, address: str) -> None:
        try:
            link = await self._dial(address)
        except ShardnetError as error:
            self._book.failed(known.node, {address: str(error)}, time.monotonic())
            return
        with contextlib.suppress(LinkError):  # too many peers by now
            self._link_up(link, dialled_at=address)

    def _order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Put a node's addresses into the order in which to try them."""
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            by_host.setdefault(_host(address), []).append(address)
        return tuple(a for host in dial_order(by_host, self._own_hosts()) for a in by_host[host])

    # --- lines

    def _link_up(self, link: Link, *, dialled_at: str) -> ControlLink:
        """Begin to serve a link; return the one to use for the peer."""
        node, now = NodeId(link.peer.node), time.monotonic()
        if self._closing:
            link.abort("this node is leaving")
            raise LinkError(f"{link.peer_address}: this node is leaving")
        peer = self._peers.get(node)
        if peer is None and len(self._peers) >= MAX_PEERS:
            link.abort("too many peers")
            raise LinkError(
                f"{link.peer.name} ({link.peer_address}): refused, this node has {MAX_PEERS} peers"
            )
        smaller = self._node < node
        line = _Line(
            control=ControlLink(link, self._handler), by_smaller=bool(dialled_at) == smaller
        )
        self._book.linked(node, link.peer.name, now, dialled_at=dialled_at)
        if peer is None:
            peer = self._peers[node] = _Peer()
            self._log(f"node {link.peer.name} ({dialled_at or link.peer_address}) is here")
        peer.lines.append(line)
        self._tasks.create_task(self._serve(node, line), name=f"control {link.peer.name}")
        if smaller:
            self._retire_others(peer)
        self._news.set()
        self._changed.set()
        return peer.line.control

    def _retire_others(self, peer: _Peer) -> None:
        for line in peer.lines:
            if line is not peer.line and not line.is_retired:
                line.is_retired = True
                self._tasks.create_task(self._retire(peer, line))

    async def _retire(self, peer: _Peer, line: _Line) -> None:
        """Close a link that another one has replaced, when both sides have stopped using it.

        Where that other one has ended meanwhile, this one is needed again.
        """
        while not line.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.retire_s):
                    await line.ended.wait()
            if peer.lines and peer.line is line:
                line.is_retired = False
                return
            if line.control.is_idle:
                await line.control.link.close()

    async def _serve(self, node: NodeId, line: _Line) -> None:
        measuring = self._tasks.create_task(self._measure(line))
        try:
            await line.control.serve()
        except ShardnetError as error:
            self._ended(node, line, error)
        finally:
            measuring.cancel()
        await line.control.link.close()  # the peer is gone; its connection may take a moment more

    def _ended(self, node: NodeId, line: _Line, error: ShardnetError) -> None:
        peer = self._peers[node]
        peer.lines.remove(line)
        line.ended.set()
        if peer.lines:
            return
        del self._peers[node]
        self._book.lost(node, time.monotonic())
        if not self._closing:
            self._log(f"node {line.control.link.peer.name} is gone: {error}")
        for on_lost in tuple(peer.watchers):
            on_lost(error)
        self._news.set()
        self._changed.set()

    async def _measure(self, line: _Line) -> None:
        """Measure the round trip of a line while it lives."""
        with contextlib.suppress(ShardnetError):
            for _ in range(N_PINGS):
                line.rtts_s.append(await ping(line.control))
            while True:
                await asyncio.sleep(self._times.ping_s)
                line.rtts_s.append(await ping(line.control))

    async def _lost(self, control: ControlLink) -> None:
        """Wait until the node of `control` is lost."""
        lost = asyncio.Event()
        self.watch(control, lambda _: lost.set())
        await lost.wait()

    # --- telling

    async def _tell_news(self) -> None:
        """Tell every peer of all peers, when that has changed."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._times.gather_s)
            self._news.clear()
            for peer in list(self._peers.values()):
                self._tell(peer.line)

    def _tell(self, line: _Line) -> None:
        same_machine = _is_same_machine(line.control.link)
        told = [_known_peer(self._node, self._name, self._own_addresses(), same_machine)]
        for node in sorted(self._peers):
            known = self._book.get(node)
            if known is not None and node != line.control.link.peer.node:
                told.append(_known_peer(node, known.name, known.announced, same_machine))
        message = PeersKnown(peers=told)
        if message != line.told and not line.control.link.closed:
            line.told = message
            line.control.send(message)


def _is_same_machine(link: Link) -> bool:
    """Say whether a link goes over loopback."""
    return is_loopback(_host(link.peer_address))


def _host(address: str) -> str:
    """Return the host of an address; one of IPv4 that an IPv6 socket has seen as itself."""
    return address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")


def _known_peer(node: NodeId, name: str, addresses: Iterable[str], same_machine: bool) -> KnownPeer:
    """Write an entry; addresses that mean nothing elsewhere are left out."""
    hosts = ((address, _host(address)) for address in addresses)
    good = [a for a, h in hosts if not is_scoped(h) and (same_machine or not is_loopback(h))]
    return KnownPeer(node=node, name=name, addresses=good[:MAX_PEER_ADDRESSES])


def _is_tellable(address: str, same_machine: bool, control: ControlLink) -> bool:
    try:
        host, _ = split_address(address)
    except UsageError as error:
        raise RemoteProtocolError(f"{control.peer_name} told of an address: {error}") from error
    return not is_scoped(host) and (same_machine or not is_loopback(host))
