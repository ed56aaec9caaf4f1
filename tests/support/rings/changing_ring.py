"""A ring in one process whose stages come and go: lost, replaced, started anew beside its disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from support.rings.rings import pipeline_maker, running_stages
from support.rings.stage_chain import even_split
from support.rings.stored_rings import StoredStages
from support.rings.torch_rings import TorchStages, limits_of

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.stage.moves.slot_moves import Moves
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    Epoch,
    KvDType,
    LayerRange,
    SequenceId,
    SlotId,
    block_spans,
)


def pull(
    whence: Moves,
    whither: Moves,
    layers: LayerRange,
    end: int,
    sequence_id: SequenceId,
    slot: SlotId,
) -> int:
    """Do what a node does for MoveKv; return the bytes that went over."""
    n_bytes = 0
    for layer in layers:
        source, target = whence.part_of(layer), whither.part_of(layer)
        begin = target.next_wanted(sequence_id, layer)
        held = source.held(sequence_id, slot, layer, begin, end)
        target.expect(sequence_id, layer, held, end)
        parts = [(0, end)] if held.is_state else [*block_spans(held.first, end)]
        for part in parts:
            data = bytearray(source.read(sequence_id, slot, layer, *part))
            if data:  # some layers keep nothing
                target.write(sequence_id, layer, *part, data)
            n_bytes += len(data)
        target.came(sequence_id, layer, end)
    return n_bytes


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
        pipeline = self.engine.new_pipeline(pipeline_maker(limits.epoch, self.stages.vocab_size))
        await self._run(pipeline)
        self.engine.resume(pipeline, limits, prefixes=prefixes)

    async def stop(self) -> None:
        """End the stages; what they were to write is on disk then."""
        await self._running.aclose()
        if self._stored is not None:
            self._stored.settle()
            self._stored.close()

    def _prepare(self, n_stages: int) -> tuple[RingLimits, Prefixes | None]:
        """Have empty stages of so many parts, others than the present ones."""
        self._epoch += 1
        key = (n_stages, self._epoch % 2 > 0)
        if key not in self._made:
            ranges = even_split(self._n_layers, n_stages)
            self._made[key] = TorchStages(
                self._folder, ranges, context=self._context, kv_dtype=self._kv_dtype
            )
        self.stages = self._made[key]
        for compute in self.stages.computes:
            compute.reset()
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

    async def _run(self, pipeline: Pipeline) -> None:
        engine, epoch = self.engine, self._epoch

        def on_broken(error: ShardnetError) -> None:
            if epoch == self._epoch:
                engine.fail(error)

        self._running = AsyncExitStack()
        await self._running.enter_async_context(
            running_stages(self.stages.computes, pipeline, Epoch(epoch), on_broken)
        )

    def _move(self, former: TorchStages, computed: ComputedSequence) -> None:
        """Bring what a sequence has on all stages to the present ones."""
        sequence_id, ids = computed.sequence_id, computed.token_ids
        for target in self.stages.computes:
            target.moves.begin(sequence_id, ids)
            for source in former.computes:
                for layer in target._model.layers:
                    if source.moves.has_layer(layer):
                        pull(
                            source.moves,
                            target.moves,
                            LayerRange(layer, layer + 1),
                            len(ids),
                            sequence_id,
                            computed.slot,
                        )
            assert target.moves.is_whole(sequence_id, len(ids))

    @property
    def blocks_used(self) -> Sequence[int]:
        """Blocks in use on each stage."""
        return [cache.blocks_used for cache in self.stages.caches]
