"""Membership of one node in one ring: its data links, those of its span, the worker between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from msgspec import UNSET

from shardnet import errors
from shardnet.runtime.processors.alertness import SPIN_NS, Alertness
from shardnet.runtime.ring.links import LinkSink, LinkSource, TailLink, TailSink
from shardnet.runtime.ring.pipeline import LocalSink, Pipeline
from shardnet.runtime.ring.shard_links import ShardLinks, ShardSink
from shardnet.runtime.shards.spanning_stage import SpanningCompute
from shardnet.runtime.stage.handover import Lane, LaneWorkers
from shardnet.runtime.stage.worker import StageSink, StageSource
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.link import Link
from shardnet.types import Epoch, NodeId, StepId
from shardnet.wire.messages.handshake import Hello, Purpose, error_frame
from shardnet.wire.messages.stages import LoadStage


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEnd:
    """This node's end of a data link; `shard` for one between the nodes of its stage.

    `purpose` is DATA, or PARTS for the connection beside that one.
    """

    ring: str
    epoch: Epoch
    rank: int
    shard: int | None = None
    purpose: Purpose = Purpose.DATA


DialData = Callable[[str, DataEnd], Awaitable[Link]]
"""Opens a data link to an address."""


_OF_SHARDS: Final = (Purpose.DATA, Purpose.PARTS)
"""The links between two nodes of a stage."""


class StageSpan:
    """Shard `shard` of a stage that spans the nodes at `addresses`, of which each has one.

    `end` is this node's end of its links to the others.
    """

    def __init__(self, *, shard: int, addresses: tuple[str, ...], end: DataEnd) -> None:
        self.shard = shard
        self._addresses = addresses
        self._end = end
        self._links: dict[tuple[int, Purpose], Link] = {}
        self._accepted: dict[tuple[int, Purpose], asyncio.Future[Link]] = {
            (other, purpose): asyncio.get_running_loop().create_future()
            for other in range(shard + 1, len(addresses))
            for purpose in _OF_SHARDS
        }

    @property
    def own_address(self) -> str:
        """This node's address."""
        return self._addresses[self.shard]

    @property
    def links(self) -> list[Link]:
        """The links that are open, to be ended with the ring."""
        done = [f.result() for f in self._accepted.values() if f.done() and not f.cancelled()]
        return [*self._links.values(), *(link for link in done if link not in self._links.values())]

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError unless `hello` is that of a shard of this stage, the first time."""
        end = self._end
        expected = (hello.ring, hello.epoch, hello.rank) == (end.ring, end.epoch, end.rank)
        key = None if hello.shard is UNSET else (hello.shard, hello.purpose)
        waiting = None if key is None else self._accepted.get(key)
        if not expected or waiting is None or waiting.done():
            raise errors.UsageError(
                f"shard {hello.shard} of rank {hello.rank} of ring {hello.ring} epoch "
                f"{hello.epoch} opened a {hello.purpose.value} link here, expected each shard from "
                f"{self.shard + 1} to {len(self._addresses) - 1} of rank {end.rank} of ring "
                f"{end.ring} epoch {end.epoch}, once"
            )

    def accept(self, link: Link) -> None:
        """Take the link of a shard. Raises UsageError as `check_hello`."""
        self.check_hello(link.peer)
        assert link.peer.shard is not UNSET
        self._accepted[link.peer.shard, link.peer.purpose].set_result(link)

    async def connect(self, dial: DialData, within_s: float) -> ShardLinks:
        """Open the links to all other shards, and the connections for parts beside them.

        Raises what dialing raises, and PeerFailedError for a shard that opens none in time.
        """
        for other in range(self.shard):
            for purpose in _OF_SHARDS:
                end = replace(self._end, purpose=purpose)
                self._links[other, purpose] = await dial(self._addresses[other], end)
        if self._accepted:
            await asyncio.wait(self._accepted.values(), timeout=within_s)
        for (other, purpose), accepted in self._accepted.items():
            if not accepted.done():
                raise errors.PeerFailedError(
                    f"{self._addresses[other]} did not open its {purpose.value} link to shard "
                    f"{self.shard} of its stage within {within_s:.0f} s",
                    remedy=f"check that it can reach {self._addresses[self.shard]}",
                )
            if accepted.cancelled():
                raise errors.PeerFailedError("this node has left the ring", remedy="ask again")
            self._links[other, purpose] = accepted.result()
        return ShardLinks(
            shard=self.shard,
            links={
                other: link for (other, what), link in self._links.items() if what is Purpose.DATA
            },
            connections=await self._connections(),
            epoch=self._end.epoch,
        )

    async def _connections(self) -> dict[int, DirectConnection]:
        """Take the connections for parts from the loop: all of them, or none."""
        taken: dict[int, DirectConnection] = {}
        try:
            for (other, purpose), link in self._links.items():
                if purpose is Purpose.PARTS:
                    taken[other] = await link.detach()
        except BaseException:
            for connection in taken.values():
                connection.close()
            raise
        return taken

    def cancel(self) -> None:
        """Wait for no link any more."""
        for accepted in self._accepted.values():
            accepted.cancel()


def span_of(message: LoadStage) -> StageSpan | None:
    """Return the nodes of the stage that `message` orders, None for this one alone."""
    if not message.shard_nodes:
        return None
    return StageSpan(
        shard=message.shard,
        addresses=tuple(message.shard_nodes),
        end=DataEnd(
            ring=message.ring,
            epoch=Epoch(message.epoch),
            rank=message.rank,
            shard=message.shard,
        ),
    )


log = logging.getLogger(__name__)

NEIGHBOUR_S = 10.0
"""How long a node waits for the data links of its neighbours in the ring."""
SETTLE_S = 5.0
"""How long a built ring may take to its first step before another head may use its nodes."""

KEEP_S = 60.0
"""How long a stage whose ring broke keeps what sequences hold, for the ring that comes next, of
which layers may have to be loaded first."""
HEADLESS_KEEP_S = 5.0
"""How long where the head is lost: with the time to notice that, slots are free within 10 s."""

OnBroken = Callable[[errors.ShardnetError, NodeId | None], None]
"""Takes why a ring broke here, and the neighbour that fell silent if that is why."""


@dataclass(kw_only=True, eq=False, repr=False)
class RingMembership:
    """This node's membership of one ring in one epoch.

    `addresses` are the ring's nodes in order. `on_broken` is called once, with the cause, when the
    ring breaks here before `leave`. While steps are awaited it spins if `may_spin`. `owner` is the
    head's node id, `owner_name` its display name. `span` are the nodes of its stage, None for
    this one alone.
    """

    ring: str
    epoch: Epoch
    rank: int
    addresses: tuple[str, ...]
    model: str
    owner: str
    """Node id of the head, the only node that may end it while sequences are open."""
    owner_name: str
    dial: DialData
    on_broken: OnBroken
    may_spin: Callable[[], bool] = lambda: False
    now_s: Callable[[], float] = time.monotonic
    span: StageSpan | None = None

    def __post_init__(self) -> None:
        self.is_loaded = False
        """Whether its stage is loaded."""
        self.last_step = StepId(0)
        self._alertness: Alertness | None = None
        self._shards: ShardLinks | None = None
        self._close_parts: Callable[[], asyncio.Future[None]] | None = None
        """Closes its connections for parts, on the thread that uses them."""
        self._joined_at_s = 0.0
        self._lost_owner = False
        self._is_joining = False
        self._upstream: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._links: list[Link] = []
        self._left = False
        self._worker: LaneWorkers | None = None
        self._task: asyncio.Task[None] | None = None
        self._slots: Sequence[Lane] = ()
        """What holds slots for this ring, until they are freed."""
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def own_address(self) -> str:
        """This node's address in its ring."""
        return self.addresses[self.rank] if self.span is None else self.span.own_address

    @property
    def n_open(self) -> int:
        """Sequences that are open on this stage."""
        if self.is_over or self._worker is None:
            return 0
        return len(self._worker.open_sequences)

    @property
    def is_busy(self) -> bool:
        """Whether sequences are open on this stage."""
        return self.n_open > 0

    @property
    def is_over(self) -> bool:
        """Whether the ring broke here, or will never be built since its head is lost."""
        return self._lost_owner if self._task is None else self._task.done()

    @property
    def is_forming(self) -> bool:
        """Whether its ring is being built, or was built just now and has run no step."""
        if self._left or self.is_over:
            return False
        if self._task is None:
            return True
        return not self.last_step and self.now_s() - self._joined_at_s < SETTLE_S

    def lose_owner(self) -> None:
        """Note that the head is lost: a ring that it was building will never be built.

        A ring that is built ends when its links do.
        """
        self._lost_owner = True
        if self._expiry is not None:
            self._expiry.cancel()
            self._keep_slots()

    def accept(self, link: Link) -> None:
        """Take the data link of the stage before this one.

        Raises UsageError when the hello is for another ring, epoch or rank, or comes twice.
        """
        self.check_hello(link.peer)
        if self.span is not None and link.peer.shard is not UNSET:
            self.span.accept(link)
        else:
            self._upstream.set_result(link)

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError unless `hello` is that of the stage before this one, the first time.

        Or that of another node of this stage.
        """
        if self.span is not None and (hello.shard is not UNSET or self.span.shard):
            self.span.check_hello(hello)
            return
        expected = (self.ring, self.epoch, (self.rank - 1) % len(self.addresses))
        is_expected = (hello.ring, hello.epoch, hello.rank) == expected
        if not is_expected or hello.purpose is not Purpose.DATA or self._upstream.done():
            raise errors.UsageError(
                f"rank {hello.rank} of ring {hello.ring} epoch {hello.epoch} opened a "
                f"{hello.purpose.value} link here, expected rank {expected[2]} of "
                f"ring {self.ring} epoch {self.epoch}, once"
            )

    async def join(self, lanes: Sequence[Lane], pipeline: Pipeline | None) -> None:
        """Open the links to both neighbours and start to work with `lanes`, in their order.

        `pipeline` is the head's; other ranks have none. Returns when the stage is ready for steps.
        Raises LinkError when a neighbour does not answer, PeerFailedError if `leave` is called
        meanwhile, UsageError the second time.
        """
        if self._is_joining:
            raise errors.UsageError(f"ring {self.ring} was asked to connect twice")
        self._is_joining = True
        if self.may_spin() and (len(self.addresses) > 1 or self.span is not None):
            self._alertness = Alertness(stir=partial(lanes[0].executor.stir, SPIN_NS))
        await self._connect_shards(lanes[0])
        source, sink, tail = await self._connect(pipeline)
        self._check_not_left()
        self._joined_at_s = self.now_s()
        self._slots = lanes
        self._worker = LaneWorkers(
            lanes,
            rank=self.rank,
            source=source,
            sink=sink,
            on_step_done=self._step_done,
            alertness=self._alertness,
        )
        self._task = asyncio.create_task(
            self._run(self._worker, tail, pipeline), name=f"rank {self.rank} of ring {self.ring}"
        )

    def revoke(self, error: errors.ShardnetError) -> None:
        """Report through `on_broken` that this node leaves, unless the ring broke before."""
        if not self.is_over:
            self.on_broken(error, None)

    async def leave(self) -> None:
        """Stop working and close the links. The stage's slots are all free afterwards.

        A `join` that is still in progress fails, and closes what it opens. If the ring broke here
        nobody waits for last words, and a neighbour may hang: its links are dropped at once. Raises
        PeerFailedError where the compute thread hangs: the slots are freed should it go on.
        """
        self._left = True
        self._upstream.cancel()  # who comes while this waits is turned away
        if self.span is not None:
            self.span.cancel()
        is_broken = self._task is not None and self._task.done()
        if self._task is not None:
            self._end_gathers()
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._alertness is not None:
            self._alertness.close()  # a task that was cancelled before it began has not
        if self._expiry is not None:
            self._expiry.cancel()
        lanes, self._slots = self._slots, ()
        freed = [lane.executor.submit(lane.compute.reset) for lane in lanes]
        if self._close_parts is not None:
            freed.append(self._close_parts())
        if freed:
            await asyncio.wait(freed)
        for link in self._open_links():
            if is_broken or link.peer.purpose is Purpose.PARTS:  # there are no last words on it
                link.abort("this node has left the ring")
            else:
                await link.close()
        for reset in freed:
            reset.result()

    def _open_links(self) -> list[Link]:
        """Return all links of this membership, to neighbours and to the nodes of its stage."""
        links = [*self._links]
        if self._upstream.done() and not self._upstream.cancelled():
            links.append(self._upstream.result())
        return links if self.span is None else [*links, *self.span.links]

    async def _connect_shards(self, lane: Lane) -> None:
        """Open the links to the other nodes of this stage, and let it compute with them."""
        if self.span is None:
            return
        compute = lane.compute
        if not isinstance(compute, SpanningCompute):
            raise errors.UsageError("the stage of this node was not loaded as a part of one")
        try:
            shards = await self.span.connect(self.dial, NEIGHBOUR_S)
        finally:
            if self._left:  # who left has closed the links of then
                for link in self.span.links:
                    link.abort("this node has left the ring")
        if self._left:
            shards.close()
        self._check_not_left()
        self._shards = shards
        self._close_parts = partial(lane.executor.submit, shards.close)
        compute.connect(shards)

    async def _connect(
        self, pipeline: Pipeline | None
    ) -> tuple[StageSource, StageSink, TailLink | None]:
        n_stages = len(self.addresses)
        arrived = _do_nothing if self._alertness is None else self._alertness.arrived
        if self._shards is not None and self._shards.shard:
            return self._shards.source(arrived), ShardSink(), None
        if pipeline is not None and n_stages == 1:
            return pipeline, LocalSink(pipeline), None
        own = DataEnd(ring=self.ring, epoch=self.epoch, rank=self.rank)
        downstream = await self.dial(self.addresses[(self.rank + 1) % n_stages], own)
        if self._left:
            downstream.abort("this node has left the ring")
        self._check_not_left()
        self._links.append(downstream)
        upstream = await self._wait_for_upstream()
        if pipeline is not None:
            tail = TailLink(upstream, self.epoch, arrived)
            return pipeline, LinkSink(downstream, self.epoch), tail
        is_tail = self.rank == n_stages - 1
        sink = (TailSink if is_tail else LinkSink)(downstream, self.epoch)
        return LinkSource(upstream, self.epoch, arrived), sink, None

    def _check_not_left(self) -> None:
        if self._left:
            raise errors.PeerFailedError(
                f"this node left ring {self.ring} while its links were being opened",
                remedy="ask again",
            )

    async def _wait_for_upstream(self) -> Link:
        await asyncio.wait([self._upstream], timeout=NEIGHBOUR_S)
        self._check_not_left()
        if self._upstream.done():
            return self._upstream.result()
        before = self.addresses[self.rank - 1]
        raise errors.PeerFailedError(
            f"{before} did not open its data link to rank {self.rank} within {NEIGHBOUR_S:.0f} s",
            remedy=f"check that it can reach {self.addresses[self.rank]}",
        )

    async def _run(
        self, worker: LaneWorkers, tail: TailLink | None, pipeline: Pipeline | None
    ) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(worker.run())
                if tail is not None and pipeline is not None:
                    tasks.create_task(_read_answers(tail, pipeline))
                if self._shards is not None:
                    for reading in self._shards.readers():
                        tasks.create_task(reading)
        except* errors.ShardnetError as group:
            self._break(errors.first_error(group))
        except* Exception as group:  # our own bug: the ring must end by name, not hang
            cause = errors.first_error(group)
            log.error(
                "rank %d of ring %s failed: %r in %s",
                self.rank,
                self.ring,
                cause,
                errors.where(cause),
            )
            log.debug("in full:", exc_info=cause)
            self._break(errors.internal_error(f"rank {self.rank}", cause))
        finally:
            if self._alertness is not None:
                self._alertness.close()
            self._end_gathers()

    def _end_gathers(self) -> None:
        """Let the compute thread wait for no other node of this stage any more."""
        if self._shards is not None:
            self._shards.fail(errors.LostShardError(f"this node has left ring {self.ring}"))

    def _break(self, error: errors.ShardnetError) -> None:
        """Report to both neighbours and through `on_broken` why this stage stops.

        What became of a link here is no link error of theirs: those say which link it was.
        """
        silent: NodeId | None = None
        has_upstream = self._upstream.done() and not self._upstream.cancelled()
        if isinstance(error, errors.RemoteProtocolError) and has_upstream:
            silent = NodeId(self._upstream.result().peer.node)  # data come from nobody else
        told = (
            errors.PeerFailedError(error.message) if isinstance(error, errors.LinkError) else error
        )
        for link in self._open_links():
            if link.peer.purpose is Purpose.PARTS:
                continue  # its connection was handed over, so that it is closed in any case
            if not link.closed:
                link.send(error_frame(told))
            elif isinstance(error, errors.PeerSilentError | errors.RemoteProtocolError):
                silent = NodeId(link.peer.node)
        self._keep_slots()
        self.on_broken(error, silent)

    def _keep_slots(self) -> None:
        keep_s = HEADLESS_KEEP_S if self._lost_owner else KEEP_S
        self._expiry = asyncio.get_running_loop().call_later(keep_s, self._free_slots)

    def _free_slots(self) -> None:
        """Free the slots of a ring that broke, and that no other one has come after."""
        lanes, self._slots = self._slots, ()
        for lane in lanes:
            lane.executor.post(lane.compute.reset, lambda _: None, _not_freed)

    def _step_done(self, step: StepId) -> None:
        self.last_step = step


def _do_nothing() -> None:
    """Take no notice of a step."""


async def _read_answers(tail: TailLink, pipeline: Pipeline) -> None:
    tail.offer(lambda: True, pipeline.answer)
    while True:
        pipeline.answer(await tail.receive())


def _not_freed(error: Exception) -> None:
    log.error("slots of a ring that broke were not freed: %r", error)
