"""The switch between the nodes of scripts/chaos: delays, drops, cuts and changes what it passes on.

Every link that a node opens goes through it (troubled_node.py), which says who dials which port;
so each direction between two nodes has conditions of its own. It runs in the loop of its user.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

VARIABLE = "CHAOS_NODE"
"""Tells a node's process, as JSON, its number, the switch and where to take orders."""
PREFACE = struct.Struct("<HH")
"""What a node sends first: its number and the port that it dials."""
REACHED, REFUSED = b"+", b"-"
"""What it gets: the connection is there, or nothing listens at that port."""

CHUNK_BYTES = 64 * 1024
SEGMENT_BYTES = 1448
RETRANSMITTED_S = 0.2
"""How long TCP takes at least to send a lost segment again: so loss shows to who uses it."""


@dataclass(slots=True, kw_only=True)
class Way:
    """What happens to all that goes from one node to another.

    `passes` is cleared where nothing comes through; what waits comes through later, as TCP has it.
    `to_flip` bytes are changed among the next pieces, one in the share `flipped` of all.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0
    to_flip: int = 0
    flipped: float = 0.0
    n_bytes: int = 0
    passes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passes.set()


class Switch:
    """Passes on connections between nodes on `host`, by their number and port."""

    def __init__(self, host: str, targets: dict[int, tuple[str, int]], chance: random.Random):
        self.port = 0
        self._host = host
        self._targets = targets
        self._chance = chance
        self._ways: dict[tuple[int, int], Way] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def n_connections(self) -> int:
        """Connections that are open."""
        return len(self._tasks)

    def way(self, source: int, target: int) -> Way:
        """The way from one node to another."""
        return self._ways.setdefault((source, target), Way())

    def ways(self, node: int, other: int | None = None, *, inward: bool = True) -> Iterator[Way]:
        """The ways to a node (`inward`) or from it: those of one other node, or of all."""
        others = [other] if other is not None else [n for n in self._targets if n != node]
        for far in others:
            yield self.way(far, node) if inward else self.way(node, far)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                await self._join(reader, writer)
            finally:
                writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, port = PREFACE.unpack(await reader.readexactly(PREFACE.size))
        target = next(number for number, (_, p) in self._targets.items() if p == port)
        there, back = self.way(source, target), self.way(target, source)
        await there.passes.wait()
        await back.passes.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._targets[target])
        except OSError:
            writer.write(REFUSED)
            await writer.drain()
            return
        writer.write(REACHED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(there, reader, far_writer))
                group.create_task(self._pump(back, far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.transport.abort()

    async def _pump(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what comes by one connection, in order; its end too, a reset as a reset."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(32)
        now = asyncio.get_running_loop().time

        async def deliver() -> None:
            free_at = 0.0
            while True:
                due, data = await queue.get()
                if due > now():
                    await asyncio.sleep(due - now())
                if way.bytes_per_s:
                    free_at = max(free_at, now()) + len(data) / way.bytes_per_s
                    await asyncio.sleep(free_at - now())
                await way.passes.wait()
                if not data and not writer.is_closing():
                    writer.write_eof()
                if not data:
                    return
                if writer.is_closing():
                    raise ConnectionResetError
                writer.write(self._changed(way, data))
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                data = await reader.read(CHUNK_BYTES)
                way.n_bytes += len(data)
                await queue.put((now() + self._latency(way, len(data)), data))
                if not data:
                    return

    def _latency(self, way: Way, n_bytes: int) -> float:
        segments = -(-n_bytes // SEGMENT_BYTES)
        lost = way.loss and any(self._chance.random() < way.loss for _ in range(segments))
        return way.delay_s + (RETRANSMITTED_S if lost else 0.0)

    def _changed(self, way: Way, data: bytes) -> bytes:
        if way.flipped and data and self._chance.random() < way.flipped:
            way.to_flip += 1
        if not way.to_flip:
            return data
        changed = bytearray(data)
        while way.to_flip:
            way.to_flip -= 1
            changed[self._chance.randrange(len(changed))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)


@contextlib.contextmanager
def changed(ways: Iterator[Way], change: Callable[[Way], None]) -> Iterator[None]:
    """Change some ways within the context; afterwards they are as new ones are."""
    taken = list(ways)
    for way in taken:
        change(way)
    try:
        yield
    finally:
        for way in taken:
            way.delay_s = way.loss = way.bytes_per_s = 0.0
            way.to_flip, way.flipped = 0, 0.0
            way.passes.set()
