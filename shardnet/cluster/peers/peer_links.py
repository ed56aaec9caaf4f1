"""The control links that are up, by node: which one requests use, its round trip, its clock.

If two nodes dial each other at once, both use the link that the smaller node id has opened, and
that node closes the other one once it is idle. Links that were opened with the cluster's present
key come before others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink, Handler
from shardnet.cluster.peers.rtt_probe import N_PINGS, ping
from shardnet.cluster.peers.supervision import supervised
from shardnet.errors import LinkError, PeerSilentError, ShardnetError
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most
from shardnet.types import NodeId
from shardnet.wire.messages.activity import ClockRead, ReadClock
from shardnet.wire.messages.membership import PeersKnown

MAX_PEERS: Final = 32
"""Largest number of peers with a link to this node."""
AGAIN_S: Final = 0.5
"""How long a peer whose last link broke is dialled again before it counts as lost."""


@dataclass(slots=True, kw_only=True, eq=False)
class PeerLink:
    """A control link to a peer.

    `dialled_at` is the address that this node dialled, "" if the peer has opened the link;
    `by_smaller` whether the smaller of both node ids has opened it.
    """

    control: ControlLink
    dialled_at: str
    by_smaller: bool
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    is_retired: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    last_sent: PeersKnown | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    """A linked node: its links, and the callbacks for the end of the last one."""

    links: list[PeerLink] = field(default_factory=list)
    watchers: list[Callable[[ShardnetError], None]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False, repr=False)
class PeerLinks:
    """The links of every peer. Runs their readers in `tasks`, a group that outlives them.

    `retire_s`: how long (s) a replaced link stays open at least. `ping_s`: interval (s) between
    measurements of the round trip. `on_gone` is called with a node whose last link has ended.
    `dial_again` opens a link to a node and calls `up` for it. `is_present` says whether a link was
    opened with the cluster's present key.
    """

    node: NodeId
    handler: Handler
    tasks: asyncio.TaskGroup
    retire_s: float
    ping_s: float
    log: Callable[[str], None]
    on_gone: Callable[[NodeId], None]
    dial_again: Callable[[NodeId], Awaitable[None]]
    is_present: Callable[[Link], bool] = lambda link: True

    def __post_init__(self) -> None:
        self._peers: dict[NodeId, _Peer] = {}
        self._broken: dict[NodeId, _Peer] = {}
        """Peers whose last link just broke, and which are being dialled again."""
        self._redials: set[asyncio.Task[None]] = set()
        self._closing = False
        self.on_up: Callable[[ControlLink], None] = lambda control: None
        """Called with each link that comes up."""

    def __contains__(self, node: NodeId) -> bool:
        return node in self._peers

    @property
    def is_full(self) -> bool:
        """Whether there are MAX_PEERS peers."""
        return len(self._peers) >= MAX_PEERS

    def in_use(self) -> dict[NodeId, PeerLink]:
        """Return the link of each peer that requests use, by node id."""
        return {node: self._used(self._peers[node]) for node in sorted(self._peers)}

    def linked(self) -> list[ControlLink]:
        """Return the link to each peer that requests use, sorted by the peer's name."""
        controls = [self._used(peer).control for peer in self._peers.values()]
        return sorted(controls, key=lambda control: control.link.peer.name)

    def link_of(self, node: NodeId) -> ControlLink | None:
        """Return the link to a node, None if there is none."""
        peer = self._peers.get(node)
        return self._used(peer).control if peer is not None else None

    async def settled(self) -> None:
        """Wait until peers whose last link broke are linked again or lost: AGAIN_S at most."""
        if self._redials:
            await asyncio.wait(self._redials)

    def is_dialled(self, node: NodeId, address: str) -> bool:
        """Return whether a link to a node that is up was dialled at `address`."""
        peer = self._peers.get(node)
        return peer is not None and any(one.dialled_at == address for one in peer.links)

    def rtt_s(self, node: NodeId) -> float | None:
        """Return the shortest recent round trip to a node (s), None before it is measured."""
        peer = self._peers.get(node)
        return min(self._used(peer).rtts_s, default=None) if peer is not None else None

    def latest(self, control: ControlLink) -> ControlLink:
        """Return the link to the same node that requests should use now; if none, `control`."""
        return self.link_of(NodeId(control.link.peer.node)) or control

    def up(self, link: Link, *, dialled_at: str) -> ControlLink:
        """Begin to serve a link that this node dialled at `dialled_at`, or that the peer opened
        ("").

        Returns the link to use for the peer. Raises LinkError, and drops the link, if there are
        MAX_PEERS peers already, or this node is leaving.
        """
        node = NodeId(link.peer.node)
        if self._closing:
            link.abort("this node is leaving")
            raise LinkError(f"{link.peer_address}: this node is leaving")
        peer = self._peers.get(node)
        if peer is None and self.is_full:
            link.abort("too many peers")
            raise LinkError(
                f"{link.peer.name} ({link.peer_address}): refused, this node has {MAX_PEERS} peers"
            )
        if peer is None and (peer := self._broken.pop(node, None)) is not None:
            self._peers[node] = peer
        smaller = self.node < node
        peer_link = PeerLink(
            control=ControlLink(
                link, self.handler, on_lost=lambda error: self._ended(node, peer_link, error)
            ),
            dialled_at=dialled_at,
            by_smaller=bool(dialled_at) == smaller,
        )
        if peer is None:
            peer = self._peers[node] = _Peer()
            self.log(f"node {link.peer.name} ({dialled_at or link.peer_address}) is here")
        peer.links.append(peer_link)
        self.tasks.create_task(self._serve(node, peer_link), name=f"control {link.peer.name}")
        if smaller:
            self._retire_others(peer)
        self.on_up(peer_link.control)
        return self._used(peer).control

    def _used(self, peer: _Peer) -> PeerLink:
        """Return the link that requests use: opened with the present key and by the smaller id, the
        oldest of these.
        """
        return min(
            peer.links, key=lambda one: (not self.is_present(one.control.link), not one.by_smaller)
        )

    def watch(
        self, control: ControlLink, on_lost: Callable[[ShardnetError], None]
    ) -> Callable[[], None]:
        """Call `on_lost` once when the last link to the node of `control` ends, with its error.

        A node whose link broke is dialled once more before that. If the node is lost already,
        `on_lost` is called at once. Returns a function that ends the watch.
        """
        node = NodeId(control.link.peer.node)
        peer = self._peers.get(node) or self._broken.get(node)
        if peer is None:
            on_lost(control.ended or LinkError(f"{control.peer_name}: the link has ended"))
            return lambda: None
        peer.watchers.append(on_lost)

        def stop() -> None:
            with contextlib.suppress(ValueError):  # it was called already
                peer.watchers.remove(on_lost)

        return stop

    async def close(self) -> None:
        """Close every link, and accept no more."""
        self._closing = True
        await self.leave()

    async def leave(self) -> None:
        """Close every link."""
        links = [peer_link for peer in self._peers.values() for peer_link in peer.links]
        await asyncio.gather(*(peer_link.control.link.close() for peer_link in links))

    def _retire_others(self, peer: _Peer) -> None:
        for peer_link in peer.links:
            if peer_link is not self._used(peer) and not peer_link.is_retired:
                peer_link.is_retired = True
                self.tasks.create_task(self._retire(peer, peer_link))

    async def _retire(self, peer: _Peer, peer_link: PeerLink) -> None:
        """Close a link that another one has replaced, once it is idle.

        Keep it if the other one has ended meanwhile.
        """
        while not peer_link.ended.is_set():
            async with at_most(self.retire_s):
                await peer_link.ended.wait()
            if peer.links and self._used(peer) is peer_link:
                peer_link.is_retired = False
                return
            if peer_link.control.is_idle:
                await peer_link.control.link.close()

    async def _serve(self, node: NodeId, peer_link: PeerLink) -> None:
        what = f"measuring the link of {peer_link.control.peer_name}"
        measure = partial(self._measure, peer_link)
        measuring = self.tasks.create_task(supervised(measure, what, self.log))
        try:
            await peer_link.control.serve()
        except ShardnetError as error:
            self._ended(node, peer_link, error)
        finally:
            measuring.cancel()
        await peer_link.control.link.close()  # the peer is gone; TCP takes a moment more

    def _ended(self, node: NodeId, peer_link: PeerLink, error: ShardnetError) -> None:
        """Remove a link that has ended; do nothing if it is removed already."""
        if peer_link.ended.is_set():
            return
        peer = self._peers[node]
        peer.links.remove(peer_link)
        peer_link.ended.set()
        if peer.links:
            return
        del self._peers[node]
        name, link = peer_link.control.link.peer.name, peer_link.control.link
        took_long = isinstance(error, PeerSilentError)  # dialling again is too late then
        if peer.watchers and not (self._closing or link.was_left or took_long):
            self._broken[node] = peer
            redial = self.tasks.create_task(self._try_again(node, name, peer, error))
            self._redials.add(redial)
            redial.add_done_callback(self._redials.discard)
        else:
            self._lose(node, name, peer, error)

    async def _try_again(self, node: NodeId, name: str, peer: _Peer, error: ShardnetError) -> None:
        """Dial a node whose last link broke once more; declare it lost if no link comes up."""
        with contextlib.suppress(ShardnetError, TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self.dial_again(node)
        if self._broken.get(node) is peer:
            del self._broken[node]
            self._lose(node, name, peer, error)

    def _lose(self, node: NodeId, name: str, peer: _Peer, error: ShardnetError) -> None:
        """Notify watchers that no link to a node is left."""
        if not self._closing:
            self.log(f"node {name} is gone: {error}")
        for on_lost in tuple(peer.watchers):
            on_lost(error)
        self.on_gone(node)

    async def _measure(self, peer_link: PeerLink) -> None:
        """Measure the round trip of a link while it lives."""
        with contextlib.suppress(ShardnetError):
            for _ in range(N_PINGS):
                peer_link.rtts_s.append(await ping(peer_link.control))
            while True:
                await asyncio.sleep(self.ping_s)
                peer_link.rtts_s.append(await ping(peer_link.control))


N_READINGS: Final = 5
"""Readings of one comparison. The quickest is used: delays in one direction distort the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far (us) a peer's clock is ahead of ours, at `at_us` of our clock.

    `within_us` is the largest possible error of `ahead_us`.
    """

    at_us: int
    ahead_us: float
    within_us: float


async def compare_clock(control: ControlLink) -> ClockOffset:
    """Measure the offset of the clock that times a peer's stage. Raises what ControlLink.ask
    raises.
    """
    readings = [await _read(control) for _ in range(N_READINGS)]
    return min(readings, key=lambda reading: reading.within_us)


async def _read(control: ControlLink) -> ClockOffset:
    asked_us = now_us()
    read = await control.ask(ReadClock(request=0), ClockRead)
    answered_us = now_us()
    under_way_us = (answered_us - asked_us) - (read.sent_us - read.received_us)
    return ClockOffset(
        at_us=answered_us,
        ahead_us=clock_ahead(asked_us, read.received_us, read.sent_us, answered_us),
        within_us=max(0, under_way_us) / 2,
    )


def same_clock() -> ClockOffset:
    """Return the offset of our own clock."""
    return ClockOffset(at_us=now_us(), ahead_us=0, within_us=0)


def now_us() -> int:
    """Read the clock by which stages are timed."""
    return time.perf_counter_ns() // 1000


def clock_ahead(asked: float, received: float, sent: float, answered: float) -> float:
    """Return how far the clock of a peer is ahead of ours, as NTP finds it (RFC 5905, section 8).

    `asked` and `answered` are read from our clock, `received` and `sent` from the peer's. The
    peer's processing time cancels out: the error is half the difference of the two one-way delays.
    """
    return ((received - asked) + (sent - answered)) / 2


def ahead_at(moment_us: float, before: ClockOffset, after: ClockOffset) -> float:
    """Interpolate how far (us) a clock was ahead at `moment_us` of our clock.

    The clocks of two machines drift apart at a constant rate, by up to 100 us in a second.
    """
    span_us = after.at_us - before.at_us
    if span_us <= 0:
        return before.ahead_us
    share = min(1.0, max(0.0, (moment_us - before.at_us) / span_us))
    return before.ahead_us + share * (after.ahead_us - before.ahead_us)
