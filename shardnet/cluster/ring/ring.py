"""A ring, as its head builds, watches and ends it.

Knows the order of commands that turn a plan into a running engine, and that a ring breaks as a
whole. Must not choose plans nor know clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from shardnet.cluster.peers.peer_links import ClockOffset
from shardnet.cluster.ring.engine_maker import EngineMaker
from shardnet.cluster.ring.ring_spec import RingSpec, RingUse
from shardnet.cluster.ring.stage_port import StagePort, ask_all
from shardnet.errors import (
    BusyError,
    PeerFailedError,
    ShardnetError,
    WrongValuesError,
    internal_error,
)
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.ring.pipeline import Pipeline, StuckStage
from shardnet.transport.loop import finish, together
from shardnet.types import Epoch, NodeId
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.diagnostics import RingLoad, RingWork, StageWork
from shardnet.wire.messages.generation import ExpertCount
from shardnet.wire.messages.stages import CountExperts, ExpertsCounted, LoadStage, StageReady

WATCH_EVERY_S = 5.0
"""How often the head checks for a stage that is stuck."""

WAY_OUT = "ask again once every node runs, or name with --nodes those that do"
"""What a person can do when a ring has lost a node or a link."""

OnStageProgress = Callable[[int, Phase, int, int], None]
"""Takes (rank, what is done, bytes done, bytes in all)."""
OnBusy = Callable[[BusyError], Awaitable[None]]
"""Waits before a node that was busy is asked again, or raises the error it is given."""


async def give_up(error: BusyError) -> None:
    """Raise `error` at once: never wait for a busy node."""
    raise error


class Seat(NamedTuple):
    """The place of a node in a ring: part `shard` of the stage of a rank."""

    rank: int
    shard: int
    port: StagePort


class Ring:
    """A built ring. `broken` holds what ended it, None while it runs."""

    def __init__(
        self,
        spec: RingSpec,
        ports: Sequence[StagePort],
        epoch: Epoch,
        sources: Sequence[str] = (),
        chunk_s: float | None = None,
        on_busy: OnBusy = give_up,
        former: Ring | None = None,
        spans: Sequence[Sequence[StagePort]] = (),
    ) -> None:
        """Take the spec and one port per rank, and in `spans` those of its stage's further nodes.

        `sources` are addresses from which nodes fetch weights they lack, `chunk_s` is the predicted
        time of a whole prompt chunk in all stages, `on_busy` decides how to treat a busy node. The
        ring takes over the engine and the users of `former`, once it is built.
        """
        self.spec = spec
        self._on_busy = on_busy
        self._sources = tuple(sources)
        self.name = secrets.token_hex(8)
        self.epoch = epoch
        self.broken: ShardnetError | None = None
        self._is_over = asyncio.Event()
        self.ports = tuple(ports)
        """Its nodes, in order."""
        self.seats: tuple[Seat, ...] = tuple(
            Seat(rank, 0, port) for rank, port in enumerate(ports)
        ) + tuple(
            Seat(rank, shard, port)
            for rank, further in enumerate(spans)
            for shard, port in enumerate(further, 1)
        )
        self._maker = EngineMaker(
            spec=spec,
            ports=tuple(seat.port for seat in self.seats),
            name=self.name,
            epoch=epoch,
            chunk_s=chunk_s,
            on_wrong_values=self._blame_wrong,
        )
        self._former = former
        self._is_second_try = former is not None and former.had_wrong_values
        """Whether it replaces a ring with wrong values, and the requests have not gone on yet."""
        self._distrusts_disks: bool = former is not None and (
            bool(former.wrong) or former._distrusts_disks
        )
        """Whether prompts may have been kept on disk with wrong values: then none are read."""
        self._engine: Engine | None = None
        self._use: RingUse = RingUse() if former is None else former._use
        self._watchdog: asyncio.Task[None] | None = None
        self._watches: list[Callable[[], None]] = []
        self._building: asyncio.Task[tuple[list[StageReady], Pipeline]] | None = None
        self.on_broken: Callable[[Ring], bool] = lambda ring: False
        """Called when the ring breaks after it was built; returns whether another replaces it."""
        self.on_replayed: Callable[[], None] = lambda: None
        """Called when the requests of the ring that this one replaces go on."""
        self.on_acquitted: Callable[[], None] = lambda: None
        """Called when wrong values come from another node too: no node has made them wrong."""
        self.blamed: dict[NodeId, ShardnetError] = {}
        """Nodes that were lost, hang, or could not do what the ring needs of them."""
        self.stuck: set[NodeId] = set()
        """Those of them that answer, and do not compute."""
        self.wrong: set[NodeId] = set()
        """Those of them that computed what is no number."""
        self.unreached: dict[NodeId, ShardnetError] = {}
        """Nodes to which no data link could be opened, or on whose link nothing came any more."""
        self.instead_of = ""
        """The head in whose ring's place this one comes, "" for none."""
        self.built_s = 0.0
        """How long it took to build, in seconds."""

    @property
    def engine(self) -> Engine:
        """The engine. The ring must be built."""
        assert self._engine is not None
        return self._engine

    @property
    def had_wrong_values(self) -> bool:
        """Whether it ended by them, or replaced one that did and no request went on."""
        return bool(self.wrong) or self._is_second_try

    @property
    def is_busy(self) -> bool:
        """Whether requests use it; False once it is broken."""
        return self.broken is None and self.is_in_use

    @property
    def is_in_use(self) -> bool:
        """Whether requests use it, broken or not."""
        return self._use.n_users > 0

    async def wait_until_broken(self) -> None:
        """Wait until something ends it."""
        await self._is_over.wait()

    async def wait_until_used(self) -> None:
        """Wait until a request uses it."""
        await self._use.is_used.wait()

    @property
    def idle_s(self) -> float:
        """Seconds since a request used it last, 0 while one does."""
        return self._use.idle_s

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Keep the ring from being unloaded for another one within the context."""
        return self._use.in_use()

    def work(self, load: RingLoad) -> RingWork:
        """Count what the ring has done since it was built; `load` is its present load."""
        totals = self.engine.totals
        stages = [
            StageWork(
                rank=rank,
                name=port.node_name,
                compute_us=totals.compute_us[rank],
                queue_us=totals.queue_us[rank],
                joules_per_token=totals.joules.get(rank),
            )
            for rank, port in enumerate(self.ports)
        ]
        own = {*RingWork.__struct_fields__} - {"load", "stages"}
        return RingWork(load=load, stages=stages, **{name: getattr(totals, name) for name in own})

    async def clocks(self) -> list[ClockOffset]:
        """Compare the clock of every stage with the head's, in ring order.

        Returns none where a node is gone: requests that are traced go on over the next ring.
        """
        with contextlib.suppress(ShardnetError):
            return await ask_all(port.compare_clock() for port in self.ports)
        return []

    async def expert_counts(self) -> list[ExpertCount]:
        """Count the experts of streamed layers that steps used, by stages that have such.

        Raises what `StagePort.order` raises.
        """
        asked = CountExperts(request=0, ring=self.name, epoch=self.epoch)
        found = await ask_all(port.order(asked, ExpertsCounted) for port in self.ports)
        return [
            ExpertCount(rank=rank, n_used=each.n_used, n_read=each.n_read)
            for rank, each in enumerate(found)
            if each.n_used
        ]

    @property
    def node_names(self) -> list[str]:
        """The names of its nodes, in order."""
        return [port.node_name for port in self.ports]

    @property
    def other_names(self) -> list[str]:
        """The names of its nodes beside the head, those of spans included."""
        head = self.ports[0]
        return [seat.port.node_name for seat in self.seats if seat.port is not head]

    async def build(self, on_progress: OnStageProgress) -> float:
        """Load every stage, connect them and start. Returns the seconds it took.

        Raises the first error of any node, or what was lost meanwhile; then, and when cancelled,
        no stage is left loaded, unless the ring is to replace another one.
        """
        started = time.perf_counter()
        ports = [seat.port for seat in self.seats]
        self._watches = [port.watch(partial(self._node_lost, port)) for port in ports]
        self._building = asyncio.create_task(self._ready(on_progress))
        try:
            self._check_not_broken()
            await asyncio.wait([self._building])
            self._check_not_broken()
            ready, pipeline = self._building.result()
        except (ShardnetError, asyncio.CancelledError):
            self._building.cancel()
            await finish(self._undo(self._building))
            raise
        self._start(ready, pipeline)
        self._watchdog = asyncio.create_task(self._watch(), name=f"watchdog of ring {self.name}")
        self.built_s = time.perf_counter() - started
        return self.built_s

    async def _ready(self, on_progress: OnStageProgress) -> tuple[list[StageReady], Pipeline]:
        """Load and connect all stages; return what they have, and the pipeline they work for."""
        ready = await self._load(on_progress)
        self._check_not_broken()
        if self._former is None:
            self._engine = self._maker.engine(ready)
            pipeline = self._engine.pipeline
        else:
            pipeline = self._former.engine.new_pipeline(self._maker.pipeline)
        await self._connect(pipeline)
        return ready, pipeline

    async def _undo(self, building: asyncio.Task[tuple[list[StageReady], Pipeline]]) -> None:
        """Free what was loaded of a ring that is not built to its end.

        If it was to replace another one, the next attempt may want that.
        """
        await asyncio.wait([building])
        if not building.cancelled():
            building.exception()  # it is raised, or what broke the ring is
        if self._former is None:
            await self.unload()
        else:
            self._stop_watching()

    def _start(self, ready: Sequence[StageReady], pipeline: Pipeline) -> None:
        """Take over the requests of the ring that this one replaces."""
        if self._former is None:
            return
        self._engine, self._former = self._former.engine, None
        prefixes = None if self._distrusts_disks else self._maker.prefixes(ready)
        self._engine.resume(
            pipeline,
            self._maker.limits(ready, prefixes),
            prefixes=prefixes,
            stage=self.ports[0].first_stage,
            on_replayed=self._replayed,
        )

    def _replayed(self) -> None:
        self._is_second_try = False
        self.on_replayed()

    def break_(self, error: ShardnetError) -> None:
        """End the ring: its requests wait for the one that replaces it, or fail with `error`.

        The first cause counts.
        """
        if self.broken is not None:
            return
        self.broken = error
        self._is_over.set()
        if self._building is not None and not self._building.done():
            self._building.cancel()
        elif self._engine is not None and not self.on_broken(self):
            self._engine.fail(error)

    def give_up(self, error: ShardnetError) -> None:
        """End the ring and its requests, which have waited for another one in vain."""
        self.broken = self.broken or error
        self._is_over.set()
        if self._engine is not None:
            self._engine.fail(error)

    def fell_silent(self, node: NodeId, of: NodeId, error: ShardnetError) -> None:
        """Note that `node` has heard nothing of `of` on their data link, or nothing right.

        The head is not blamed.
        """
        head = self.ports[0].node
        self.unreached[of if of != head else node] = error

    def lost(self, cause: str) -> None:
        """End the ring because of what happened to a node or a link of it."""
        self.break_(PeerFailedError(cause, remedy=WAY_OUT))

    async def unload(self, keep: Collection[str] = ()) -> None:
        """Free the stage on every node that still answers; its requests end.

        Nodes at the addresses `keep` keep their weights: their next order reuses or frees them.
        """
        self.on_broken = lambda ring: False
        self.break_(PeerFailedError("the ring was unloaded"))
        if self._engine is not None:
            self._engine.fail(self.broken or PeerFailedError("the ring was unloaded"))
        await self.release(keep)

    async def release(self, keep: Collection[str] = ()) -> None:
        """Free the stage on every node that still answers, as `unload`, but no request ends."""
        self._stop_watching()
        at = [(seat.port, self.spec.shard_nodes(seat.rank)[seat.shard]) for seat in self.seats]
        await asyncio.gather(*(self._unload(port) for port, address in at if address not in keep))

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        for stop_watching in self._watches:
            stop_watching()

    async def _load(self, on_progress: OnStageProgress) -> list[StageReady]:
        """Have all stages loaded at the same time, those of ranks first in what it returns.

        Nodes are asked in the order of their ids, the next one when one has taken the order: of
        heads that build rings at the same time, one has all it needs, and none waits for another
        that waits for it.
        """
        loads: dict[Seat, asyncio.Task[StageReady]] = {}
        async with together() as tasks:
            for seat in sorted(self.seats, key=lambda at: at.port.node):
                taken = asyncio.Event()
                load = self._load_stage(seat, on_progress, taken)
                loads[seat] = tasks.create_task(load)
                await taken.wait()
        return [loads[seat].result() for seat in self.seats]

    async def _load_stage(
        self, seat: Seat, on_progress: OnStageProgress, taken: asyncio.Event
    ) -> StageReady:
        """Have one stage, or its shard, loaded. Sets `taken` when the node has taken the order."""
        port = seat.port

        def progress(phase: Phase, done_bytes: int, total_bytes: int) -> None:
            taken.set()
            if not seat.shard:
                on_progress(seat.rank, phase, done_bytes, total_bytes)

        while True:
            try:
                ready = await port.load(self.order(seat.rank, seat.shard), progress)
            except BusyError as error:
                self.blamed[port.node] = error
                if taken.is_set():
                    raise
                await self._on_busy(error)
                del self.blamed[port.node]
                on_progress(seat.rank, "waiting", 0, 0)
            except ShardnetError as error:
                self.blamed[port.node] = error
                raise
            else:
                taken.set()
                return ready

    def order(self, rank: int, shard: int = 0) -> LoadStage:
        """Return the order to load of a rank."""
        return self.spec.order(
            rank,
            shard,
            ring=self.name,
            epoch=self.epoch,
            sources=self._sources,
            instead_of=self.instead_of,
        )

    async def _connect(self, pipeline: Pipeline) -> None:
        async with together() as tasks:
            for seat in self.seats:
                tasks.create_task(self._connect_stage(seat, pipeline))

    async def _connect_stage(self, seat: Seat, pipeline: Pipeline) -> None:
        """Have a stage dial the next one. If it cannot, that is blamed; the head never is.

        A shard beside the first dials others of its stage, and is blamed itself.
        """
        try:
            await seat.port.connect(self.name, self.epoch, pipeline)
        except ShardnetError as error:
            if seat.shard:
                self.unreached[seat.port.node] = error
                raise
            rank = seat.rank
            following = rank + 1 if rank + 1 < len(self.ports) else rank
            self.unreached[self.ports[following].node] = error
            raise

    def _check_not_broken(self) -> None:
        """Raise what has broken the ring: a ready stage may be lost before the others are."""
        if self.broken is not None:
            raise self.broken

    def _node_lost(self, port: StagePort, error: ShardnetError) -> None:
        self.blamed[port.node] = error
        why = str(error).removeprefix(f"{port.name}: ")
        self.lost(f"node {port.name} was lost: {why}")

    async def _watch(self) -> None:
        while self.broken is None:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                stuck = self.engine.pipeline.stuck_stage([port.last_step for port in self.ports])
                if stuck is not None:
                    self._blame_stuck(stuck)
            except Exception as error:  # a ring that nobody watches could hang
                self.break_(internal_error("the ring's watchdog", error))

    def _blame_stuck(self, stage: StuckStage) -> None:
        port = self.ports[stage.rank]
        error = PeerFailedError(
            f"node {port.name} is stuck: step {stage.step} has waited {stage.age_s:.0f} s there, "
            f"and no step should take {stage.limit_s:.0f} s",
            remedy="restart that node",
        )
        self.blamed[port.node] = error
        self.stuck.add(port.node)
        self.break_(error)

    def _blame_wrong(self, error: WrongValuesError) -> bool:
        """Do without the node of a stage that computed wrong values; return whether that is done.

        The head stays, and so does a stage that several nodes share: nobody knows which of them it
        was. Where a second node computes such values for the same requests it is the model, or what
        it was asked. Then the requests of the step end.
        """
        if self.broken is not None:
            return True
        seat = [one.port for one in self.seats if one.rank == error.rank]
        if self._is_second_try:
            self.on_acquitted()
        if self._is_second_try or len(seat) != 1 or seat[0] is self.ports[0]:
            return False
        cause = PeerFailedError(
            f"node {seat[0].name} computed wrong values: {error.message}", remedy=error.remedy
        )
        self.blamed[seat[0].node] = cause
        self.wrong.add(seat[0].node)
        self.break_(cause)
        return True

    def found_wrong(self, place: int, error: WrongValuesError) -> None:
        """Do without the node in one of `seats` that an audit has found computing wrong bits.

        The head stays, since the requests are with it: its layers are loaded anew.
        """
        if self.broken is not None:
            return
        port = self.seats[place].port
        cause = PeerFailedError(
            f"node {port.node_name} computes wrong bits: {error.message}", remedy=error.remedy
        )
        if place:
            self.blamed[port.node] = cause
        self.wrong.add(port.node)
        self.break_(cause)

    async def _unload(self, port: StagePort) -> None:
        with contextlib.suppress(ShardnetError):  # lost, or in another ring by now: nothing is left
            await port.unload(self.name)
