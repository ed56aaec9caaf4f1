"""The stage of this node: loaded, joined to a ring, freed.

Knows that a node has at most one stage and one ring membership at a time. Heads command it.
Must not plan, nor know clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardnet.cluster.member.refusals import (
    Refusals,
    generating_with,
    leaving,
    refuse_if_busy,
    refuse_others,
)
from shardnet.cluster.member.ring_membership import DialData, OnBroken, RingMembership, span_of
from shardnet.cluster.member.stage_loader import PrefixDisk, PreparedStage, StageLoader, stage_state
from shardnet.errors import PeerFailedError, ShardnetError, TakenError, UsageError
from shardnet.runtime.loading.loaded_stage import LoadedStage, computes_by_device
from shardnet.runtime.loading.loading import release_freed_memory, set_compute_threads
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.runtime.stage.compute import ComputePlugin, StageCompute
from shardnet.runtime.stage.executor import ComputeThreads, Executor
from shardnet.runtime.stage.handover import Lane
from shardnet.runtime.stage.stage_order import ONE_DEVICE, StageDevice, StageOrder
from shardnet.stage.packs.pack_cache import drop_pages
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most
from shardnet.types import Epoch, LayerRange, WireDType
from shardnet.wire.messages.diagnostics import StageState
from shardnet.wire.messages.handshake import Hello
from shardnet.wire.messages.stages import LoadStage

if TYPE_CHECKING:  # it imports torch
    from shardnet.stage.moves.slot_moves import Moves
    from shardnet.stage.prefixes.prefix_store import PrefixStore
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes

T = TypeVar("T")

MeasureTogether = Callable[[int], Sequence[Callable[[], float]]]
"""Makes a job in seconds for each of so many devices, which wait for each other."""

CLOSE_S = 2.0
"""How long a node that leaves waits for a thread, before it leaves the thread behind."""


class StageHost:
    """Holds at most one loaded stage and one ring membership. `dial` opens its data links.

    While that ring goes on, a second stage may be made ready for the ring that replaces it.

    Quantised weights are kept below the folder `packs`, finished prompts in `prefixes`. A `plugin`
    computes in place of torch. `may_spin` is asked for each ring, whether to spin while steps are
    awaited. `node` is this node: its own orders it takes while it drains, since requests that it
    leads may need another ring. What is loaded may be on several `devices`, whose memory is given
    in their order. Several may `compute` on the same threads.
    """

    def __init__(
        self,
        *,
        dial: DialData,
        node: str = "",
        packs: Path | None = None,
        prefixes: PrefixStore | None = None,
        plugin: ComputePlugin | None = None,
        may_spin: Callable[[], bool] = lambda: False,
        devices: Sequence[StageDevice] = ONE_DEVICE,
        compute: ComputeThreads | None = None,
    ) -> None:
        self._dial = dial
        self._may_spin = may_spin
        self._packs = packs
        self._prefix_disk = PrefixDisk()
        self.compute = compute or ComputeThreads(devices)
        self._has_own_threads = compute is None
        self._moves_thread = Executor("shardnet-moves")
        self._loader = StageLoader(
            packs=packs, plugin=plugin, prefixes=prefixes, compute=self.compute
        )
        self._changing = asyncio.Lock()
        self.refusals = Refusals(node=node)
        """What this node refuses now, and of whom."""
        self.loaded: LoadedStage | None = None
        self.membership: RingMembership | None = None
        self._prepared: PreparedStage | None = None
        self.is_preparing = False
        """Whether a stage is being loaded for a ring to come."""
        self._overtaken: TakenError | None = None
        """Why what is prepared now is not wanted any more."""

    def state(self) -> StageState | None:
        """Describe the loaded stage and its place in a ring, for people."""
        n_devices = len(self.compute.devices)
        return stage_state(self.loaded, self._prepared, self.membership, n_devices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are loaded, for this ring and for one to come."""
        return sum(self.weight_bytes_by_device)

    @property
    def weight_bytes_by_device(self) -> list[int]:
        """The same for each device."""
        parts = {id(part): part for stage in self._stages for part in stage.parts or (stage,)}
        n_bytes = [part.weight_bytes_by_place for part in parts.values()]
        places = range(len(self.compute.devices))
        return [sum(of_part[place] for of_part in n_bytes) for place in places]

    @property
    def _stages(self) -> list[LoadedStage]:
        """The stage that is in use and the one that is ready; they may be one."""
        stages = [self.loaded, self._prepared.stage if self._prepared is not None else None]
        return [stage for stage in stages if stage is not None]

    @property
    def progress(self) -> tuple[int, int]:
        """(epoch, last completed step), for heartbeats."""
        return (self.membership.epoch, self.membership.last_step) if self.membership else (0, 0)

    async def enter_ring(
        self, message: LoadStage, *, owner: str, owner_name: str, on_broken: OnBroken
    ) -> RingMembership:
        """Become a member of the ring of `message`, and leave the ring that this node was in.

        No other head may use this node until that ring is built. The former ring is ended with an
        error. `owner` is the head's node id, `owner_name` its display name. Raises BusyError while
        sequences of another head are open, TakenError while another one builds its ring,
        PeerFailedError when this node leaves, SupersededError if another node leads in its place.
        """
        self.refusals.check_not_draining(owner, self.membership)
        self.refusals.check_not_superseded(owner, message.epoch, self.membership)
        refuse_others(self.membership, owner)  # whose loading keeps the lock for long
        self._overtake(f"ring {message.ring} came before it was ready")
        async with self._changing:
            self.refusals.check_not_closing()
            refuse_others(self.membership, owner)
            self.refusals.check_not_superseded(owner, message.epoch, self.membership)
            if message.instead_of:
                self.refusals.supersede(message.instead_of, message.epoch, owner)
            if self.membership is not None and self.membership.ring != message.ring:
                self.membership.revoke(PeerFailedError(f"the node joined ring {message.ring}"))
            await self._leave()
            self.membership = RingMembership(
                ring=message.ring,
                epoch=Epoch(message.epoch),
                rank=message.rank,
                addresses=tuple(message.addresses),
                model=message.form.model,
                owner=owner,
                owner_name=owner_name,
                dial=self._dial,
                on_broken=on_broken,
                may_spin=self._may_spin,
                span=span_of(message),
            )
            return self.membership

    def _overtake(self, why: str) -> None:
        """End what is being made ready, if anything is: it keeps the lock for long.

        Not for good: a head that lost this node to another one's ring asks again.
        """
        if self.is_preparing:
            self._overtaken = TakenError(why)
            self._loader.cancel(self._overtaken)

    def head_lost(self, ring: str) -> None:
        """Note that the head of `ring` is lost: a ring that it was building will never be built."""
        if self.membership is not None and self.membership.ring == ring:
            self.membership.lose_owner()

    async def leave_ring(self, membership: RingMembership) -> None:
        """End `membership`, unless another one has replaced it already."""
        async with self._changing:
            if self.membership is membership:
                await self._leave()

    async def load(
        self,
        membership: RingMembership,
        order: StageOrder,
        *,
        sent: WireDType,
        received: WireDType,
        threads: int,
        memory_bytes: Sequence[int],
        on_progress: Callable[[int, int], None],
    ) -> tuple[LoadedStage, bool]:
        """Have the stage of `order` loaded for `membership`.

        Returns the stage and whether it was there already. A stage of another order is freed first;
        for other wire dtypes, `sent` and `received`, it need not be. Raises what loading raises,
        BusyError or TakenError while another head has taken this node for its ring meanwhile, and
        PeerFailedError when its ring has ended or this node shuts down; then nothing of this order
        is left loaded.
        """
        async with self._changing:
            self.refusals.check_not_closing()
            if self.membership is not membership:
                refuse_others(self.membership, membership.owner)  # which say where to go instead
                raise PeerFailedError(
                    f"this node is no member of ring {membership.ring} any more", remedy="ask again"
                )
            self.compute.share_cores(threads, set_compute_threads)
            set_compute_threads(threads)  # of this thread, which may compute short steps itself
            reused = self._take_prepared(membership.ring, order)
            if not reused:
                # What has come was for sequences of another ring, whose numbers come again.
                await self.forget_arrivals()
                reused = await self._loader.fits(self.loaded, order)
            if self.loaded is None or not reused:
                kept = self.loaded.kept if self.loaded is not None else []
                await self._free()
                loading = self._loader.load(order, memory_bytes, on_progress, kept=kept)
                del kept  # what the next stage does not take is to be freed
                self.loaded = await loading
            compute = self.loaded.compute
            await self.compute.run(lambda: compute.use_wire(sent, received))
            membership.is_loaded = True
            return self.loaded, reused

    async def prepare(
        self,
        ring: str,
        owner: str,
        order: StageOrder,
        *,
        memory_bytes: Sequence[int],
        on_progress: Callable[[int, int], None],
        stands_for: str = "",
    ) -> tuple[LoadedStage, bool]:
        """Have the stage of `order` loaded for a ring to come, while this node's ring goes on.

        Layers that are here are kept. `load` for that ring takes it. Returns the stage and whether
        it was here. `stands_for` is the node whose loss brings that ring, "" for none. Raises
        CapacityError if both do not fit, what loading raises, and as `enter_ring`.
        """
        self.refusals.check_not_draining(owner, None if stands_for else self.membership)
        refuse_others(self.membership, owner)
        if not stands_for:  # that ring is due, a loss perhaps never
            self._overtake(f"ring {ring} comes first")
        async with self._changing:
            self.refusals.check_not_closing()
            refuse_others(self.membership, owner)
            self.is_preparing, self._overtaken = True, None
            try:
                stage = await self._loader.find(order, self._stages)
                was_here = stage is not None
                before = await self._replace_prepared(ring)
                lacking = [] if was_here else await self._loader.lacking(self.loaded, order)
                if stage is None and self._overtaken is not None:  # before work could be cancelled
                    raise self._overtaken
                if self.loaded is not None and lacking:
                    stage = await self._loader.grow(
                        self.loaded, order, lacking, memory_bytes, on_progress
                    )
                if stage is None:
                    held_bytes = self.weight_bytes_by_device
                    kept = self.loaded.kept if self.loaded is not None else []
                    stage = await self._loader.load(
                        order, memory_bytes, on_progress, held_bytes, kept
                    )
            finally:
                self.is_preparing = False
            if before is not None and before.rows is not None and stage.moves is not None:
                await self._moves_thread.run(partial(stage.moves.take_arrivals, before.rows))
            self._prepared = PreparedStage(
                ring=ring, stands_for=stands_for, order=order, stage=stage
            )
            return stage, was_here

    async def follow(
        self, ring: str, owner: str, order: StageOrder, *, stands_for: str
    ) -> LoadedStage:
        """Take in what sequences hold in the layers of `order` that this node lacks.

        Their weights are not loaded until `prepare` for that ring. Returns the stage in use. Raises
        UsageError if it cannot be joined to that of `order`, and as `enter_ring`.
        """
        refuse_others(self.membership, owner)
        async with self._changing:
            self.refusals.check_not_closing()
            refuse_others(self.membership, owner)
            if self.loaded is None:
                raise UsageError(f"this node is in no ring that it could follow {stands_for} in")
            rows = await self._loader.follow(self.loaded, order)
            await self._replace_prepared(ring)
            self._prepared = PreparedStage(
                ring=ring, stands_for=stands_for, order=order, stage=None, rows=rows
            )
            return self.loaded

    async def _replace_prepared(self, ring: str) -> PreparedStage | None:
        """Have nothing ready; return what was ready for `ring`, with all that has arrived."""
        before, self._prepared = self._prepared, None
        if before is None or before.ring == ring:
            return before
        await self.forget_arrivals()
        return None

    def _take_prepared(self, ring: str, order: StageOrder) -> bool:
        """Put the stage that was made ready for a ring into use, if it is that of `order`."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.stage is None:
            return False
        if (prepared.ring, prepared.order) != (ring, order):
            return False
        old, self.loaded = self.loaded, prepared.stage
        if old is not None and old is not prepared.stage:
            self._prefix_disk.retire(old, prepared.stage)
            self._loader.release_soon()
        return True

    def drop_prepared(self, ring: str) -> None:
        """Free what was made ready for a ring that does not come."""
        if self._prepared is not None and self._prepared.ring == ring:
            self._prepared = None

    async def drop_standby(self) -> None:
        """Free what was made ready for the loss of another node."""
        if self._prepared is not None and self._prepared.stands_for:
            self._prepared = None
            await self._loader.release_freed_memory()

    def moves_of(self, ring: str, epoch: int) -> Moves:
        """Return what moves sequences from this node's stage; for jobs on the compute thread.

        Raises UsageError unless this node is a member of that ring and its stage can give them.
        """
        self._membership(ring, epoch)
        return _moves(self.loaded.moves if self.loaded is not None else None)

    def prepared_layers(self, ring: str) -> LayerRange:
        """Return the layers that the stage for a ring caches, or will. Raises UsageError."""
        return self._prepared_for(ring).order.caching

    async def on_moves(self, ring: str, epoch: int, job: Callable[[Moves], T]) -> T:
        """Run `job` with what sequences hold on this node's stage, on the compute thread.

        Raises as `moves_of`, and what `job` raises.
        """
        return await self.compute.run(partial(job, self.moves_of(ring, epoch)))

    async def on_arrivals(self, ring: str, job: Callable[[Moves], T], *, is_free: bool = True) -> T:
        """Run `job` with what arrives for the stage that is ready for a ring.

        Beside steps if it `is_free`. Raises UsageError if no stage is ready, and what `job` raises.
        """
        moves = _moves(self._prepared_for(ring).moves)
        return await self.beside_compute(partial(job, moves), is_free)

    async def beside_compute(self, job: Callable[[], T], is_free: bool) -> T:
        """Run a job that copies memory beside steps if it `is_free`, and else between two."""
        return await (self._moves_thread.run(job) if is_free else self.compute.run(job))

    async def forget_arrivals(self) -> None:
        """Drop what has arrived and was not opened."""
        places = (self.loaded, self._prepared)
        for moves in {id(place.moves): place.moves for place in places if place}.values():
            if moves is not None:
                await self._moves_thread.run(moves.forget)

    def _prepared_for(self, ring: str) -> PreparedStage:
        if self._prepared is None or self._prepared.ring != ring:
            raise UsageError(f"no stage is ready here for ring {ring}", remedy="ask again")
        return self._prepared

    async def on_prefixes(
        self, ring: str, epoch: int, job: Callable[[StagePrefixes], T], *, is_long: bool
    ) -> T:
        """Run `job` with the prefixes of this node's stage, on a thread that reads files.

        A job that `is_long` waits for others of its kind, and holds up no short one.

        Raises UsageError unless this node is a member of that ring and keeps prefixes, what `job`
        raises, and DiskSilentError if the disk does not answer.
        """
        self._membership(ring, epoch)
        prefixes = self.loaded.prefixes if self.loaded is not None else None
        if prefixes is None:
            raise UsageError("this node keeps no prefixes of this model on disk")
        return await self._prefix_disk.run(prefixes, job, is_long=is_long)

    def part_with(self, ring: str, epoch: int, layer: int) -> LoadedStage:
        """Return the part of this node's stage that has a layer.

        Raises UsageError unless this node is a member of that ring and has it.
        """
        self._membership(ring, epoch)
        part = self.loaded.with_layer(layer) if self.loaded is not None else None
        if part is None:
            raise UsageError(f"layer {layer} is not in the stage of this node", remedy="ask again")
        return part

    def member_order(self, ring: str, epoch: int) -> StageOrder:
        """Return how this node's stage of a ring was loaded. Raises as `part_with`."""
        self._membership(ring, epoch)
        if self.loaded is None:
            raise UsageError(f"ring {ring} has no stage here yet", remedy="ask again")
        return self.loaded.order

    def distrust(self) -> None:
        """Use nothing of this node's stage again: the next ring has it loaded anew."""
        for part in self.loaded.parts or (self.loaded,) if self.loaded is not None else ():
            if part.audit is not None:
                part.audit.is_wrong = True

    async def between_steps(self, job: Callable[[], T], place: int) -> T:
        """Run a short job on the compute thread of a device. Raises what it raises."""
        return await self.compute.submit(job, place)

    async def on_first_part(self, job: Callable[[StageCompute], T]) -> T:
        """Run a short job on the compute thread of the first layers' device, with what computes.

        Raises what it raises, and PeerFailedError where no stage is loaded.
        """
        if self.loaded is None:
            raise PeerFailedError("the stage of the head is not there any more", remedy="ask again")
        place, compute = computes_by_device(self.loaded)[0]
        return await self.compute.submit(lambda: job(compute), place)

    async def beside_steps(self, job: Callable[[], T], what: str) -> T:
        """Run a job on the loading thread for `what`; see StageLoader.run."""
        return await self._loader.run(what, job)

    async def measure(
        self,
        job: Callable[[Callable[[], None]], T],
        on_progress: Callable[[int, int], None],
        place: int = 0,
    ) -> T:
        """Run `job`, which computes, on the compute thread. It calls what it is given in between.

        Raises BusyError when sequences are open here, also when one is opened meanwhile, what `job`
        raises, and PeerFailedError when this node shuts down. When cancelled, waits until the
        thread has stopped.
        """
        async with self._changing:
            self.refusals.check_not_closing()
            self.check_idle()
            try:
                with self._loader.working(on_progress) as reporter:

                    def tick() -> None:
                        self.check_idle()
                        reporter.report(0, 1)

                    return await reporter.to_its_end(
                        self.compute.submit(
                            lambda: job(tick), place, alive=lambda: reporter.n_reports
                        )
                    )
            finally:
                await self._loader.release_freed_memory()

    async def measure_together(self, job: MeasureTogether) -> float:
        """Run a job on every device at the same time; return what the first one's tells.

        Raises BusyError when sequences are open here, what `job` raises, PeerFailedError when this
        node shuts down.
        """
        async with self._changing:
            self.refusals.check_not_closing()
            self.check_idle()
            n_devices = len(self.compute.devices)
            each = job(n_devices)
            running = [self.compute.submit(each[place], place) for place in range(n_devices)]
            return (await asyncio.gather(*running))[0]

    def between_sequences(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job of less than a second for the compute thread; the future has its result.

        Raises BusyError if sequences are open here, PeerFailedError when this node shuts down.
        """
        self.refusals.check_not_closing()
        self.check_idle()
        return self.compute.submit(job)

    async def drop_caches(self) -> None:
        """Give back memory that holds only what can be made or read again.

        What sequences have is none of that, nor what the head keeps for those to come.
        """
        loaded, packs = self.loaded, self._packs
        if loaded is not None and loaded.prefixes is not None:
            loaded.prefixes.stop_writing()

        def drop() -> None:
            if packs is not None and (loaded is None or not loaded.order.n_streamed):
                drop_pages(packs)
            release_freed_memory()

        with contextlib.suppress(ShardnetError):  # the disk hangs, or this node leaves
            await self._loader.run("dropped caches", drop)

    async def wait_for_compute(self) -> None:
        """Wait until the compute thread is free, as each step does.

        Raises BusyError if it is in use, PeerFailedError when this node shuts down.
        """
        await self.between_sequences(lambda: None)

    @property
    def is_busy(self) -> bool:
        """Whether sequences are open here."""
        return self.membership is not None and self.membership.is_busy

    def check_idle(self) -> None:
        """Raise BusyError while sequences are open here."""
        if self.membership is not None and self.membership.is_busy:
            raise generating_with(self.membership.model)

    async def join(self, ring: str, epoch: int, pipeline: Pipeline | None = None) -> None:
        """Connect to both neighbours in `ring` and start to work; see RingMembership.join."""
        membership = self._membership(ring, epoch)
        if self.loaded is None or not membership.is_loaded:
            raise UsageError(f"ring {ring} was asked to connect before its stage was loaded")
        lanes = [
            Lane(compute, self.compute.of(place))
            for place, compute in computes_by_device(self.loaded)
        ]
        await membership.join(lanes, pipeline)

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError if `hello` is not that of the stage before this one in its ring."""
        self._membership(hello.ring, hello.epoch).check_hello(hello)

    def accept(self, link: Link) -> None:
        """Take a data link. Raises UsageError if it is not from the stage before this one."""
        self._membership(link.peer.ring, link.peer.epoch).accept(link)

    async def unload(self, owner: str, ring: str = "") -> bool:
        """Leave the ring and free the weights, unless this is a member of another than `ring`.

        "" stands for any. Returns whether it was done. Raises BusyError while sequences of another
        head than `owner` are open.
        """
        if self._has_joined_another(ring):  # whose loading keeps the lock for long
            return False
        refuse_if_busy(self.membership, owner)
        self._overtake(f"ring {ring or 'of this node'} was freed before it was ready")
        async with self._changing:
            if self._has_joined_another(ring):
                return False
            refuse_if_busy(self.membership, owner)
            await self._leave()
            await self._free()
            return True

    async def close(self) -> None:
        """Leave the ring, free the weights and end the threads; what is loaded just now is not.

        Threads that hang, on a disk or in a computation, are left behind after CLOSE_S each.
        """
        self.refusals.is_closing = True
        self._loader.cancel(leaving())
        closes = [self._loader.close, self._moves_thread.close, self._prefix_disk.close]
        if self._has_own_threads:
            closes.insert(1, self.compute.close)
        for give_up in closes:
            async with at_most(CLOSE_S), self._changing:
                await self._leave()
                if self.loaded is not None:
                    await self._prefix_disk.settle(self.loaded)
                self.loaded = None
            give_up()

    def _has_joined_another(self, ring: str) -> bool:
        """Say whether this node is a member of another ring than `ring`, "" for any."""
        return ring != "" and self.membership is not None and self.membership.ring != ring

    def _membership(self, ring: str, epoch: int) -> RingMembership:
        if self.membership is None or (self.membership.ring, self.membership.epoch) != (
            ring,
            epoch,
        ):
            raise UsageError(
                f"this node is no member of ring {ring} epoch {epoch}: it has joined another "
                "ring, or never joined this one",
                remedy="ask again",
            )
        return self.membership

    async def _leave(self) -> None:
        if self.membership is not None:
            await self.membership.leave()
            self.membership = None

    async def _free(self) -> None:
        self._prepared = None
        if self.loaded is not None:
            await self._prefix_disk.settle(self.loaded)
            self.loaded = None
            await self._loader.release_freed_memory()


def _moves(moves: Moves | None) -> Moves:
    """Return what moves sequences to and from a stage. Raises UsageError where nothing can."""
    if moves is None:
        raise UsageError(
            "the stage of this node cannot move its KV cache", remedy="let it be computed again"
        )
    return moves
