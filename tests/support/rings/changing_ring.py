"""A ring in one process whose stages come and go: lost, replaced, started anew beside its disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.rings.rings import pipeline_maker, running_stages
from support.rings.stage_chain import even_split
from support.rings.stored_rings import StoredStages
from support.rings.torch_rings import TorchStages, limits_of

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.placement.standbys import Standby
from shardnet.cluster.recovery.standbys import Ready
from shardnet.errors import LinkClosedError, ShardnetError, UsageError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.runtime.stage.executor import Executor
from shardnet.stage.moves.slot_moves import HeldLayer, Moves
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    Epoch,
    KvDType,
    NodeId,
    SequenceId,
    block_spans,
)


def pull(
    found: Mapping[int, HeldLayer], whither: Moves, layers: Iterable[int], sequence_id: SequenceId
) -> int:
    """Do what a node does for MoveKv; return the bytes that went over."""
    n_bytes = 0
    for layer in layers:
        target, end = whither.part_of(layer), found[layer].end
        held = found[layer].held(target.next_wanted(sequence_id, layer))
        target.expect(sequence_id, layer, held, end)
        parts = [(held.first, end)] if held.is_state else [*block_spans(held.first, end)]
        for part in parts:
            data = bytearray(found[layer].read(*part))
            if data:  # some layers keep nothing
                target.write(sequence_id, layer, *part, data)
            n_bytes += len(data)
        target.came(sequence_id, layer, end)
    return n_bytes


class Following:
    """A ring to come, `targets`, that brings what the stage `lost` of the present one has.

    Stands for RingMoves. A round ends early where no more than `layers_left` may come.
    """

    def __init__(self, targets: TorchStages, lost: int) -> None:
        self.targets, self.lost = targets, lost
        self.n_stages = len(targets.computes)
        self.sources: TorchStages
        self.threads: Sequence[Executor]
        self.layers_left: int | None = None
        for compute in targets.computes:
            compute.moves.forget()

    async def follow(self, rank: int, source: int, one: ComputedSequence) -> None:
        moves, sequence_id = self.sources.computes[source].moves, one.sequence_id
        n_positions = len(one.token_ids)
        for target in self.targets.computes:
            target.moves.begin(sequence_id, one.token_ids)
        found = await self.threads[source].run(
            lambda: moves.look(sequence_id, one.slot, n_positions, one.state)
        )
        for target in self.targets.computes:
            for layer in found.keys() & set(target._model.layers):
                if self.layers_left == 0:
                    raise LinkClosedError("the stage was lost meanwhile")
                if self.layers_left is not None:
                    self.layers_left -= 1
                pull(found, target.moves, [layer], sequence_id)

    async def forget(self, rank: int, sequence_id: SequenceId) -> None:
        for target in self.targets.computes:
            target.moves.forget(sequence_id)


class ChangingRing:
    """A ring of a checkpoint. With `disk` its stages keep prefixes there, each those of its layers.

    `engine` is the present one: it outlives a ring that is lost, and not one that starts anew.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        kv_dtype: KvDType,
        room_blocks: int,
        room_states: int,
        disk: Path | None,
    ) -> None:
        self._folder, self._context, self._kv_dtype = folder, context, kv_dtype
        self._room_blocks, self._room_states, self._disk = room_blocks, room_states, disk
        self._n_layers = Checkpoint.open(folder).config.n_layers
        self._made: dict[tuple[int, bool], TorchStages] = {}
        self._epoch = 0
        self._stored: StoredStages | None = None
        self._running = AsyncExitStack()
        self._threads: list[Executor] = []
        self._following: Following
        self._ready: Ready
        self.stages: TorchStages
        self.engine: Engine

    async def start(self, n_stages: int) -> None:
        """Start a ring of so many stages that has nothing but what is on disk."""
        limits, prefixes = self._prepare(n_stages)
        self.engine = Engine(
            scheduler=Scheduler(limits),
            make_pipeline=pipeline_maker(limits.epoch, self.stages.vocab_size),
            clock_ns=time.perf_counter_ns,
            prefixes=prefixes,
        )
        await self._run(self.engine.pipeline)

    async def replace(self, n_stages: int, *, moves: bool) -> None:
        """Have another ring in its place: what runs is moved there, or was lost and is replayed."""
        former, computed = self.stages, []
        if moves:
            await self.engine.hold()
            computed = self.engine.computed()
        else:
            self.engine.suspend("a node was lost")
        await self.stop()
        limits, prefixes = self._prepare(n_stages)
        for each in computed:
            self._move(former, each)
        self.engine.suspend("the ring is replaced")
        self.engine.moved({each.sequence_id: len(each.token_ids) for each in computed})
        await self._resume(limits, prefixes)

    async def _resume(self, limits: RingLimits, prefixes: Prefixes | None) -> None:
        pipeline = self.engine.new_pipeline(pipeline_maker(limits.epoch, self.stages.vocab_size))
        await self._run(pipeline)
        self.engine.resume(pipeline, limits, prefixes=prefixes)

    def stand_by(self, n_stages: int, lost: int) -> None:
        """Have a ring of so many stages ready to go on when stage `lost` is lost."""
        self._following = following = Following(self._made_next(n_stages), lost)
        moves: Any = following
        self._ready = Ready(
            standby=Standby(rank=lost, node=NodeId(""), weight_bytes=0, kv_bytes=0),
            lost=NodeId(""),
            name="",
            former=moves,
            plan=moves,
            ring=moves,
            rank=0,
            moves=moves,
        )

    async def follow(self, n_rounds: int = 1, *, layers_left: int | None = None) -> None:
        """Have that ring bring what the stage has, so many times while something runs.

        With `layers_left` the stage is lost when so many layers have come.
        """
        following = self._following
        following.sources, following.threads = self.stages, self._threads
        following.layers_left = layers_left
        with suppress(LinkClosedError):
            while n_rounds and self.engine.n_active:
                before = dict(self._ready.followed)
                states = {one.state for one in before.values() if one.state is not None}
                await self._ready.follow(self.engine.to_follow(states))
                n_rounds -= self._ready.followed != before
                await asyncio.sleep(0)

    async def take_over(self) -> int:
        """Lose the stage, and go on with what was followed; return how many sequences do."""
        former, lost, computed = self.stages, self._following.lost, self.engine.computed()
        self.engine.suspend("a node was lost")
        await self.stop()
        moved = {}
        for one in self._ready.brought(computed):
            with suppress(UsageError):
                if self._take(former, lost, one):
                    moved[one.sequence_id] = len(one.token_ids)
        limits, prefixes = self._prepare(self._following.n_stages, has_arrived=True)
        self.engine.moved(moved)
        await self._resume(limits, prefixes)
        return len(moved)

    def _take(self, former: TorchStages, lost: int, one: ComputedSequence) -> bool:
        """Have the next ring take what the stages that are left have of a sequence."""
        n_positions = len(one.token_ids)
        for target in self._following.targets.computes:
            target.moves.begin(one.sequence_id, one.token_ids)
        for rank, source in enumerate(former.computes):
            if rank != lost:
                found = source.moves.look(one.sequence_id, one.slot, n_positions, one.state)
                for target in self._following.targets.computes:
                    for layer in target._model.layers:
                        if layer in found:
                            target.moves.take_own(one.sequence_id, layer, found[layer])
        targets = self._following.targets.computes
        return all(each.moves.is_whole(one.sequence_id, n_positions) for each in targets)

    async def stop(self) -> None:
        """End the stages; what they were to write is on disk then."""
        await self._running.aclose()
        if self._stored is not None:
            self._stored.settle()
            self._stored.close()

    def _prepare(
        self, n_stages: int, *, has_arrived: bool = False
    ) -> tuple[RingLimits, Prefixes | None]:
        """Have empty stages of so many parts, others than the present ones.

        What came there was for sequences of another engine unless it `has_arrived` for this one.
        """
        self.stages = self._made_next(n_stages)
        self._epoch += 1
        for compute in self.stages.computes:
            compute.reset()
            if not has_arrived:
                compute.moves.forget()
        prefixes = None
        if self._disk is not None:
            self._stored = StoredStages(self.stages, self._disk)
            prefixes = Prefixes(self._stored, b"this ring")
        limits = limits_of(
            self.stages, chunk_rows=PREFILL_CHUNK_ROWS, room_blocks=self._room_blocks
        )
        return (
            replace(
                limits,
                epoch=Epoch(self._epoch),
                room_states=self._room_states if limits.room_states else None,
                prefix_seed=prefixes.seed if prefixes else None,
            ),
            prefixes,
        )

    def _made_next(self, n_stages: int) -> TorchStages:
        key = (n_stages, self._epoch % 2 > 0)
        if key not in self._made:
            ranges = even_split(self._n_layers, n_stages)
            self._made[key] = TorchStages(
                self._folder, ranges, context=self._context, kv_dtype=self._kv_dtype
            )
        return self._made[key]

    async def _run(self, pipeline: Pipeline) -> None:
        engine, epoch = self.engine, self._epoch

        def on_broken(error: ShardnetError) -> None:
            if epoch == self._epoch:
                engine.fail(error)

        self._running, self._threads = AsyncExitStack(), []
        running = running_stages(
            *(self.stages.computes, pipeline, Epoch(epoch), on_broken), executors=self._threads
        )
        await self._running.enter_async_context(running)

    def _move(self, former: TorchStages, computed: ComputedSequence) -> None:
        """Bring what a sequence has on all stages to the present ones."""
        sequence_id, ids = computed.sequence_id, computed.token_ids
        for target in self.stages.computes:
            target.moves.begin(sequence_id, ids)
            for source in former.computes:
                found = source.moves.look(sequence_id, computed.slot, len(ids))
                layers = [layer for layer in target._model.layers if layer in found]
                pull(found, target.moves, layers, sequence_id)
            assert target.moves.is_whole(sequence_id, len(ids))

    @property
    def blocks_used(self) -> Sequence[int]:
        """Blocks in use on each stage."""
        return [cache.blocks_used for cache in self.stages.caches]
