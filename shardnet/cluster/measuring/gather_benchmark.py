"""Measure how long two nodes take to exchange parts, as two nodes of one stage do at every gather.

Knows how many parts of which sizes travel, and how little a peer may ask for. Must not know which
pairs a plan needs, nor for how long a figure is valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec

from shardnet.errors import (
    BusyError,
    LostShardError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.loading.measuring import rounded
from shardnet.runtime.ring.shard_links import ShardLinks
from shardnet.transport.link import Link
from shardnet.types import Epoch, NodeId, StepId, WireDType
from shardnet.wire.framing.frames import KIB
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

END: Final = 0
SMALL: Final = 1
LARGE: Final = 2
"""What the first byte of a part from the node that measures says of the next parts."""
PART_BYTES: Final = {SMALL: 4 * KIB, LARGE: 256 * KIB}
N_PARTS: Final = {SMALL: 100, LARGE: 16}
"""So many parts of each size travel each way at most,"""
LEAST: Final = 3
"""at least so many,"""
UNTIL_S: Final = {SMALL: 0.1, LARGE: 0.3}
"""and beyond these no more once it has taken so long in all."""
MOST_S: Final = 0.5
"""A peer with which it takes longer is not measured,"""
PART_S: Final = 0.25
"""nor one that takes longer to one part."""
LONGEST_S: Final = 1.0
"""How long a node answers."""
GIVE_UP_S: Final = 3.0
"""The same, for all of it: the connection has to come up, too."""

T = TypeVar("T")


class GatherFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an exchange of parts takes that have no bytes, and how fast their bytes travel."""

    gather_s: float
    gather_bytes_per_s: float


class ComputeThread(Protocol):
    """The thread on which a node's stage computes."""

    def check_idle(self) -> None:
        """Raise BusyError while sequences are open here; from any thread."""

    def between_sequences(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a short job. Raises as `check_idle`, PeerFailedError when this node shuts down."""


@dataclass(kw_only=True, eq=False, repr=False)
class GatherBenchmark:
    """Measures gathers with other nodes, and answers those that measure.

    `dial` opens a PARTS link of no ring to a node. Parts are exchanged on the thread of `compute`,
    while no sequences are open here.
    """

    compute: ComputeThread
    dial: Callable[[NodeId], Awaitable[Link]]
    _is_at_work: bool = field(default=False, init=False)

    async def measure(self, node: NodeId) -> GatherFigures | None:
        """Return the figures of gathers with a node; None where either end computes, does not
        answer in time or breaks the protocol.
        """
        try:
            async with asyncio.timeout(GIVE_UP_S):
                self._check_free()
                return await self._exchange(await self.dial(node), 0, _time_gathers)
        except (ShardnetError, TimeoutError):
            return None

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError for no hello of a node that measures, BusyError while sequences are open
        here or another node measures.
        """
        if hello.role is not PeerRole.NODE or (hello.epoch, hello.rank) != (0, 0):
            raise UsageError(
                f"{hello.name} opened a {Purpose.PARTS.value} link of no ring, expected a node "
                "that measures gathers, with epoch 0 and rank 0"
            )
        self._check_free()

    async def serve(self, link: Link) -> None:
        """Exchange parts with a node that measures, until it has enough."""
        with contextlib.suppress(ShardnetError):  # the other end has no figure then
            await self._exchange(link, 1, _answer_gathers)

    def _check_free(self) -> None:
        self.compute.check_idle()
        if self._is_at_work:
            raise BusyError("this node measures gathers with another one", remedy="try again")

    async def _exchange(self, link: Link, shard: int, work: Callable[[_Parts], T]) -> T:
        """Run `work` on the compute thread, over the connection of `link`, which is closed then."""
        try:
            self._check_free()
        except BusyError as error:
            link.abort(error.message)
            raise
        self._is_at_work = True
        try:
            connection = await link.detach()
            links = ShardLinks(
                shard=shard,
                links={},
                connections={1 - shard: connection},
                epoch=Epoch(0),
                part_s=PART_S,
            )
            links.begin(StepId(1))
            parts = _Parts(links, self.compute.check_idle)
            try:
                running = self.compute.between_sequences(partial(work, parts))
            except ShardnetError:
                links.close()
                raise
            running.add_done_callback(lambda _: links.close())
            try:
                return await asyncio.shield(running)
            finally:
                connection.cut()  # a job that is not awaited any more ends
        finally:
            self._is_at_work = False


class _Parts:
    """The parts that two nodes exchange, over `links`; for the compute thread.

    `check_idle` raises BusyError once sequences are open here.
    """

    def __init__(self, links: ShardLinks, check_idle: Callable[[], None]) -> None:
        self._links = links
        self._check_idle = check_idle
        self._own = {kind: bytearray(n_bytes) for kind, n_bytes in PART_BYTES.items()}
        self._others = {kind: bytearray(n_bytes) for kind, n_bytes in PART_BYTES.items()}

    def exchange(self, kind: int, following: int = END) -> int:
        """Gather two parts of a size once; return what the other one's first byte says."""
        self._check_idle()
        own, other = self._own[kind], self._others[kind]
        own[0] = following
        width = len(own) // WireDType.FLOAT32.row_bytes(1)
        received = {1 - self._links.shard: memoryview(other)}
        self._links.send_part(WireDType.FLOAT32, 1, (width, width), own, received)
        self._links.await_parts(0)
        return other[0]


def _time_gathers(parts: _Parts) -> GatherFigures:
    """Time gathers of both sizes. Raises LostShardError where the peer is too slow."""
    took_s: dict[int, list[float]] = {SMALL: [], LARGE: []}
    began_s, kind = time.perf_counter(), SMALL
    while kind != END:
        sent_s = time.perf_counter()
        if sent_s - began_s > MOST_S:
            raise LostShardError("gathers with that node take too long to be measured")
        following = _following(kind, len(took_s[kind]) + 1, sent_s - began_s)
        parts.exchange(kind, following)
        took_s[kind].append(time.perf_counter() - sent_s)
        kind = following
    return figures_of(*(statistics.median(took_s[kind]) for kind in (SMALL, LARGE)))


def _following(kind: int, n_parts: int, took_s: float) -> int:
    """Say what comes after `n_parts` of a kind, the last of which begins after `took_s`."""
    if n_parts < LEAST or (n_parts < N_PARTS[kind] and took_s < UNTIL_S[kind]):
        return kind
    return LARGE if kind == SMALL else END


def figures_of(small_s: float, large_s: float) -> GatherFigures:
    """Tell time and rate apart, by what a gather of small parts takes and one of large ones."""
    small, large = PART_BYTES[SMALL], PART_BYTES[LARGE]
    rate = (large - small) / max(large_s - small_s, large_s / 10)
    empty_s = max(small_s - small / rate, small_s / 10)
    return GatherFigures(gather_s=rounded(empty_s), gather_bytes_per_s=rounded(rate))


def _answer_gathers(parts: _Parts) -> None:
    """Send parts of the sizes that the peer asks for, until it has enough.

    Raises RemoteProtocolError for sizes that do not exist, LostShardError where it asks for more
    than anybody needs.
    """
    kind, ends_s = SMALL, time.perf_counter() + LONGEST_S
    for _ in range(sum(N_PARTS.values())):
        kind = parts.exchange(kind)
        if kind == END:
            return
        if kind not in PART_BYTES:
            raise RemoteProtocolError(f"parts of size {kind} were asked for, expected 0, 1 or 2")
        if time.perf_counter() > ends_s:
            break
    raise LostShardError("a node that measures gathers asked for too many")
