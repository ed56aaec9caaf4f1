"""The control links that are up, by node: which one requests use, how fast it is, when all end.

When two nodes dial each other at once, both keep the link that the smaller node id has opened, and
that node closes the other one when nobody uses it. Must not know addresses, candidates or what is
told over a link.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink, Handler
from shardnet.cluster.peers.rtt_probe import N_PINGS, ping
from shardnet.errors import LinkError, ShardnetError
from shardnet.transport.link import Link
from shardnet.types import NodeId
from shardnet.wire.messages.membership import PeersKnown

MAX_PEERS: Final = 32
"""Nodes that this one keeps a link to."""


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
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

    lines: list[Line] = field(default_factory=list)
    watchers: list[Callable[[ShardnetError], None]] = field(default_factory=list)

    @property
    def line(self) -> Line:
        """The one that requests use: opened by the smaller id, the oldest of these."""
        return min(self.lines, key=lambda line: not line.by_smaller)


class PeerLines:
    """The lines of every peer. Runs their readers in `tasks`, a group that outlives them.

    `retire_s`: how long a link that is not needed stays open at least. `ping_s`: between
    measurements of the round trip. `on_gone` is told a node whose last line has ended.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        handler: Handler,
        tasks: asyncio.TaskGroup,
        retire_s: float,
        ping_s: float,
        log: Callable[[str], None],
        on_gone: Callable[[NodeId], None],
    ) -> None:
        self._node = node
        self._handler = handler
        self._tasks = tasks
        self._retire_s = retire_s
        self._ping_s = ping_s
        self._log = log
        self._on_gone = on_gone
        self._peers: dict[NodeId, _Peer] = {}
        self._closing = False

    def __contains__(self, node: NodeId) -> bool:
        return node in self._peers

    @property
    def is_full(self) -> bool:
        """Whether there are as many peers as there may be."""
        return len(self._peers) >= MAX_PEERS

    def in_use(self) -> dict[NodeId, Line]:
        """Return the line of each peer that requests use, by id."""
        return {node: self._peers[node].line for node in sorted(self._peers)}

    def linked(self) -> list[ControlLink]:
        """Return the link to each peer that is up, by name of the peer."""
        controls = [peer.line.control for peer in self._peers.values()]
        return sorted(controls, key=lambda control: control.link.peer.name)

    def link_of(self, node: NodeId) -> ControlLink | None:
        """Return the link to a node, None where there is none."""
        peer = self._peers.get(node)
        return peer.line.control if peer is not None else None

    def rtt_s(self, node: NodeId) -> float | None:
        """Return the round trip to a linked node, the shortest of late, None before it is known."""
        peer = self._peers.get(node)
        return min(peer.line.rtts_s, default=None) if peer is not None else None

    def latest(self, control: ControlLink) -> ControlLink:
        """Return the link to the same node that requests should use now, `control` if none is."""
        return self.link_of(NodeId(control.link.peer.node)) or control

    def up(self, link: Link, *, dialled_at: str) -> ControlLink:
        """Begin to serve a link, dialled here unless `dialled_at` is "".

        Returns the one to use for the peer. Raises LinkError, and drops the link, when there are
        as many peers as there may be, or this node is leaving.
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
        smaller = self._node < node
        line = Line(
            control=ControlLink(link, self._handler), by_smaller=bool(dialled_at) == smaller
        )
        if peer is None:
            peer = self._peers[node] = _Peer()
            self._log(f"node {link.peer.name} ({dialled_at or link.peer_address}) is here")
        peer.lines.append(line)
        self._tasks.create_task(self._serve(node, line), name=f"control {link.peer.name}")
        if smaller:
            self._retire_others(peer)
        return peer.line.control

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

    async def close(self) -> None:
        """Say goodbye on every link, and take no more."""
        self._closing = True
        lines = [line for peer in self._peers.values() for line in peer.lines]
        await asyncio.gather(*(line.control.link.close() for line in lines))

    def _retire_others(self, peer: _Peer) -> None:
        for line in peer.lines:
            if line is not peer.line and not line.is_retired:
                line.is_retired = True
                self._tasks.create_task(self._retire(peer, line))

    async def _retire(self, peer: _Peer, line: Line) -> None:
        """Close a link that another one has replaced, when both sides have stopped using it.

        Where that other one has ended meanwhile, this one is needed again.
        """
        while not line.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retire_s):
                    await line.ended.wait()
            if peer.lines and peer.line is line:
                line.is_retired = False
                return
            if line.control.is_idle:
                await line.control.link.close()

    async def _serve(self, node: NodeId, line: Line) -> None:
        measuring = self._tasks.create_task(self._measure(line))
        try:
            await line.control.serve()
        except ShardnetError as error:
            self._ended(node, line, error)
        finally:
            measuring.cancel()
        await line.control.link.close()  # the peer is gone; its connection may take a moment more

    def _ended(self, node: NodeId, line: Line, error: ShardnetError) -> None:
        peer = self._peers[node]
        peer.lines.remove(line)
        line.ended.set()
        if peer.lines:
            return
        del self._peers[node]
        if not self._closing:
            self._log(f"node {line.control.link.peer.name} is gone: {error}")
        for on_lost in tuple(peer.watchers):
            on_lost(error)
        self._on_gone(node)

    async def _measure(self, line: Line) -> None:
        """Measure the round trip of a line while it lives."""
        with contextlib.suppress(ShardnetError):
            for _ in range(N_PINGS):
                line.rtts_s.append(await ping(line.control))
            while True:
                await asyncio.sleep(self._ping_s)
                line.rtts_s.append(await ping(line.control))
