"""Loads the stages of this node on a thread of its own, and tells how they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from shardnet.cluster.machine.device_list import METAL, MPS
from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import PeerFailedError, ShardnetError, UsageError
from shardnet.runtime.loading.loaded_stage import (
    KeptWeights,
    LoadedStage,
    Progress,
    join,
    load_by_device,
)
from shardnet.runtime.loading.loading import follow, load, release_freed_memory
from shardnet.runtime.stage.compute import ComputePlugin
from shardnet.runtime.stage.executor import ComputeThreads, ProgressReporter
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.transport.loop import finish
from shardnet.wire.framing.schema import MAX_DEVICES
from shardnet.wire.messages.diagnostics import PartState, PrefixState, StageState, StandbyState

if TYPE_CHECKING:
    from shardnet.stage.moves.slot_moves import JoinedMoves, Moves
    from shardnet.stage.prefixes.prefix_store import PrefixStore
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes


T = TypeVar("T")

LOAD_SILENCE_S = 30.0
"""How long loading may make no progress: as long as a head waits for a sign of it."""


SETTLE_PREFIXES_S = 10.0
"""How long a stage that is freed waits for finished prompts to be on disk."""


@dataclass(eq=False, kw_only=True)
class StageLoader:
    """Loads one stage at a time. For what it takes see StageHost; `compute` are its threads."""

    packs: Path | None
    plugin: ComputePlugin | None
    prefixes: PrefixStore | None
    compute: ComputeThreads

    def __post_init__(self) -> None:
        self._jobs = DiskJobs("shardnet-load", niceness=10, silence_s=LOAD_SILENCE_S)
        self._work: ProgressReporter | None = None
        """Progress of the current load or measurement."""

    def cancel(self, why: ShardnetError) -> None:
        """End the current work, if any, with an error."""
        if self._work is not None:
            self._work.cancel(why)

    @contextlib.contextmanager
    def working(self, on_progress: Callable[[int, int], None]) -> Iterator[ProgressReporter]:
        """Yield what the current work reports to, through which `cancel` ends it."""
        self._work = ProgressReporter(on_progress, asyncio.get_running_loop())
        try:
            yield self._work
        finally:
            self._work = None

    async def run(self, place: Path | str, job: Callable[[], T]) -> T:
        """Run a job on the loading thread; see DiskJobs.run."""
        return await self._jobs.run(place, job)

    async def load(
        self,
        order: StageOrder,
        memory_bytes: Sequence[int],
        on_progress: Callable[[int, int], None],
        held_bytes: Sequence[int] = (),
        kept: Sequence[KeptWeights] = (),
    ) -> LoadedStage:
        """Load on the loading thread. When cancelled, wait until the thread has stopped.

        `memory_bytes` and `held_bytes` are those of each of the node's devices.
        """

        def load_part(
            part: StageOrder, n_bytes: int, progress: Progress, kept: KeptWeights | None
        ) -> LoadedStage:
            device = part.device
            held = held_bytes[device.place] if held_bytes else 0
            loading = partial(
                load, part, n_bytes, progress, self.packs, self.plugin, self.prefixes, held, kept
            )
            if device.torch == MPS or device.driver == METAL:  # two threads there end the process
                return self.compute.of(device.place).call(loading)
            return loading()

        try:
            with self.working(on_progress) as reporter:
                return await reporter.to_its_end(
                    self._jobs.submit(
                        order.folder,
                        partial(
                            load_by_device, order, memory_bytes, load_part, reporter.report, kept
                        ),
                        alive=lambda: reporter.n_reports,
                    )
                )
        except asyncio.CancelledError:
            await finish(self.release_freed_memory())
            raise

    async def find(self, order: StageOrder, stages: Sequence[LoadedStage]) -> LoadedStage | None:
        """Return the stage of `order` if it is here: one of `stages`, or a part of one."""
        for stage in stages:
            found = await self.run(order.folder, partial(stage.part, order))
            if found is not None:
                return found
        return None

    async def fits(self, stage: LoadedStage | None, order: StageOrder) -> bool:
        """Say whether a stage is the one that `order` would give."""
        return stage is not None and await self.run(order.folder, partial(stage.fits, order))

    async def lacking(self, own: LoadedStage | None, order: StageOrder) -> list[StageOrder]:
        """Return what the stage in use lacks of `order`; nothing if it is no part of that."""
        return [] if own is None else await self.run(order.folder, partial(own.lacks, order))

    async def grow(
        self,
        own: LoadedStage,
        order: StageOrder,
        lacking: Sequence[StageOrder],
        memory_bytes: Sequence[int],
        on_progress: Callable[[int, int], None],
    ) -> LoadedStage:
        """Load what the stage in use is `lacking` of `order`, and join both."""
        stages, left_bytes = [own], [*memory_bytes]
        for part in lacking:
            for place, n_bytes in stages[-1].weight_bytes_by_place.items():
                left_bytes[place] -= n_bytes
            stages.append(await self.load(part, left_bytes, on_progress))
        return join(order, stages)

    async def follow(self, own: LoadedStage, order: StageOrder) -> JoinedMoves:
        """Make what takes in sequences for what the stage in use lacks of `order`.

        Raises UsageError if both cannot be joined.
        """
        lacking = await self.lacking(own, order)
        if not lacking:
            raise UsageError(f"the stage of this node cannot be joined to {order.layers.words}")

        def make() -> JoinedMoves:
            from shardnet.stage.moves.slot_moves import JoinedMoves

            return JoinedMoves([follow(part, own.room_blocks) for part in lacking])

        return await self.run(order.folder, make)

    async def release_freed_memory(self) -> None:
        """Return freed memory to the system, on the loading thread."""
        with contextlib.suppress(PeerFailedError):  # this node leaves, and takes it along
            await self._jobs.run("freed memory", release_freed_memory)

    def release_soon(self) -> None:
        """Return freed memory to the system; nobody waits for it."""
        self._jobs.submit("freed memory", release_freed_memory).add_done_callback(looked_at)

    def close(self) -> None:
        """End the thread."""
        self._jobs.close()


def looked_at(job: asyncio.Future[None]) -> None:
    """Retrieve the error of a job that nobody waits for: the disk hangs, or this node leaves."""
    if not job.cancelled():
        job.exception()


class PrefixDisk:
    """Reads and writes prefixes on a thread of its own."""

    def __init__(self) -> None:
        self._jobs = DiskJobs("shardnet-prefix-reader", silence_s=LOAD_SILENCE_S)

    async def run(
        self, prefixes: StagePrefixes, job: Callable[[StagePrefixes], T], *, is_long: bool
    ) -> T:
        """Run `job` with prefixes; see StageHost.on_prefixes."""
        folder = prefixes.files.store.folder
        place = folder if is_long else f"the list of {folder}"
        return await self._jobs.run(place, partial(job, prefixes))

    def retire(self, old: LoadedStage, new: LoadedStage) -> None:
        """Free a stage while the next one begins to work; the ring does not wait for it."""
        kept = prefixes_of(new)
        for prefixes in prefixes_of(old):
            if prefixes not in kept:

                def settle(prefixes: StagePrefixes = prefixes) -> None:
                    prefixes.settle(SETTLE_PREFIXES_S)
                    prefixes.close()

                folder = prefixes.files.store.folder
                self._jobs.submit(folder, settle).add_done_callback(looked_at)

    async def settle(self, loaded: LoadedStage) -> None:
        """Let finished prompts reach the disk before their memory is wanted for something else."""
        for prefixes in prefixes_of(loaded):
            folder = prefixes.files.store.folder
            try:
                with contextlib.suppress(ShardnetError):  # the disk hangs, or this node leaves
                    await self._jobs.run(folder, partial(prefixes.settle, SETTLE_PREFIXES_S))
            finally:
                prefixes.close()

    def close(self) -> None:
        """End the thread."""
        self._jobs.close()


def prefixes_of(stage: LoadedStage) -> list[StagePrefixes]:
    """List the prefixes of a stage and of its parts."""
    parts = stage.parts or (stage,)
    return [part.prefixes for part in parts if part.prefixes is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStage:
    """A stage that is ready for a ring to come; it may be the one that is in use.

    If that comes when the node `stands_for` is lost, the stage is a standby. Without a `stage` it
    is loaded then, and meanwhile what sequences hold in the layers that this node lacks comes to
    `rows`.
    """

    ring: str
    stands_for: str
    order: StageOrder
    stage: LoadedStage | None
    rows: JoinedMoves | None = None

    @property
    def moves(self) -> Moves | None:
        """What takes in sequences, None where nothing can."""
        return self.rows if self.stage is None else self.stage.moves


def stage_state(
    loaded: LoadedStage | None,
    prepared: PreparedStage | None,
    membership: RingMembership | None,
    n_devices: int,
) -> StageState | None:
    """Describe a loaded stage, one that is ready, and the place in a ring, for people.

    Its parts are told of where the node has several devices.
    """
    standby = None if prepared is None else _standby_state(prepared, loaded)
    loaded = loaded or (prepared.stage if standby and prepared else None)
    if loaded is None:
        return None
    state = StageState(
        model=loaded.order.form.model,
        layers=(loaded.order.layers.start, loaded.order.layers.end),
        dtype=loaded.order.form.dtype.value,
        kernel=loaded.kernel,
        weight_bytes=loaded.weight_bytes,
        room_blocks=loaded.room_blocks,
        used_blocks=loaded.compute.used_blocks,
        prefixes=_prefix_state(loaded.prefixes),
        standby=standby,
        parts=_parts(loaded) if n_devices > 1 else [],
    )
    if membership is None or membership.is_over:
        return state
    return replace(
        state,
        n_open=membership.n_open,
        rank=membership.rank,
        n_stages=len(membership.addresses),
        epoch=membership.epoch,
        head=membership.owner,
    )


def _parts(loaded: LoadedStage) -> list[PartState]:
    return [
        PartState(
            layers=(part.order.layers.start, part.order.layers.end),
            devices=[device.name for device in part.order.devices],
            weight_bytes=part.weight_bytes,
        )
        for part in loaded.parts or (loaded,)
    ][:MAX_DEVICES]


def _prefix_state(prefixes: StagePrefixes | None) -> PrefixState | None:
    if prefixes is None:
        return None
    store = prefixes.files.store
    return PrefixState(
        used_bytes=store.used_bytes,
        limit_bytes=store.limit_bytes,
        saved_positions=prefixes.figures.saved,
        restored_positions=prefixes.figures.restored,
        bytes_per_s=store.bytes_per_s,
    )


def _standby_state(prepared: PreparedStage, loaded: LoadedStage | None) -> StandbyState | None:
    if not prepared.stands_for:
        return None
    stage = prepared.stage
    if stage is None:
        assert prepared.rows is not None, "without a stage rows are followed"
        layers = prepared.rows.layers
        return StandbyState(
            node=prepared.stands_for, layers=(layers.start, layers.end), weight_bytes=0
        )
    parts = [part for part in stage.parts or (stage,) if part is not loaded]
    if loaded is not None:
        parts = [part for part in parts if part not in loaded.parts]
    return StandbyState(
        node=prepared.stands_for,
        layers=(parts[0].order.layers.start, parts[-1].order.layers.end) if parts else (0, 0),
        weight_bytes=sum(part.weight_bytes for part in parts),
    )
