"""Rings in one process over tiny checkpoints: the whole way from a request to its events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.rings.rings import NoText, running_ring
from support.rings.shard_followers import load_sharded
from support.rings.stage_chain import StageChain
from support.rings.stage_forms import form_of

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.sampling.sampler import Sampler
from shardnet.output_params import RoutingShape
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    TokenGenerated,
)
from shardnet.runtime.loading.loading import load
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import ComputePlugin, Samples, StageCompute
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.types import (
    LEAST_STATES,
    Epoch,
    KvDType,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)

CONTEXT = 512


class TorchStages:
    """The stages of a model, each with its KV cache, the last with the tail."""

    def __init__(
        self,
        folder: Path,
        ranges: Sequence[LayerRange],
        choice: KernelChoice | None = None,
        context: int = CONTEXT,
        kv_dtype: KvDType = KvDType.AUTO,
        n_shards: int = 1,
        *,
        has_mtp: bool = False,
    ) -> None:
        self.context = context
        config = Checkpoint.open(folder).config
        self.window, self.routing = config.smallest_window, config.routing
        self.largest_window = config.largest_window
        self.room_states = LEAST_STATES if config.has_state else None
        if n_shards == 1:
            stages = StageChain.load(
                folder, ranges, choice, context, kv_dtype, has_mtp=has_mtp
            ).stages
        else:
            stages = [
                load_sharded(folder, layers, n_shards, context=context, kv_dtype=kv_dtype)
                for layers in ranges
            ]
        self.exact_rows = min(stage.exact_rows for stage in stages)
        self.caches = [stage.kv for stage in stages]
        self.shares_blocks = all(kv.shares for kv in self.caches)
        self.vocab_size = stages[-1].vocab_size
        sampler = Sampler(self.vocab_size)
        self.computes = [
            TorchCompute(stage, sampler if stage.last else None, WireDType.FLOAT32)
            for stage in stages
        ]

    def step(
        self, position: int, ids: Sequence[int], n_sampled: int, *, slot: int = 0, n_ahead: int = 0
    ) -> Samples:
        """Send one group of rows, of the sequence numbered like its slot, through the stages.

        Sampled rows behind the first are drafts, all of them behind `n_ahead` drafts in flight.
        """
        group = RowGroup(
            sequence_id=SequenceId(slot),
            slot=SlotId(slot),
            position=position,
            n_rows=len(ids),
            n_sampled=n_sampled,
            n_drafts=n_ahead + n_sampled if n_ahead else max(0, n_sampled - 1),
        )
        batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=ids)
        result: Any = None
        for compute in self.computes:
            result = compute.compute(batch, result)
        assert isinstance(result, Samples)
        return result

    def open(self, sampling: SamplingParams, *, slot: int = 0, **rest: Any) -> None:
        """Open a sequence in a slot on every stage."""
        for compute in self.computes:
            compute.operate(
                OpenSequence(
                    sequence_id=SequenceId(slot), slot=SlotId(slot), sampling=sampling, **rest
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStages:
    """Stages that were loaded as a node loads them."""

    computes: Sequence[StageCompute | Sequence[StageCompute]]
    vocab_size: int
    context: int = CONTEXT
    window: int | None = None
    largest_window: int | None = None
    routing: RoutingShape | None = None
    room_states: int | None = None
    exact_rows: int = 1
    shares_blocks: bool = False


def load_stages(
    folder: Path, ranges: Sequence[LayerRange], plugins: Sequence[ComputePlugin | None] = ()
) -> LoadedStages:
    """Load the stages of a dense model without windows in float32, each by its plug-in if any."""
    checkpoint = Checkpoint.open(folder)
    loaded = [
        load(
            StageOrder(
                form=form_of(folder, context=CONTEXT),
                folder=folder,
                layers=layers,
                is_tail=layers.end == checkpoint.config.n_layers,
            ),
            1 << 30,
            lambda *_: None,
            plugin=plugin,
        )
        for layers, plugin in zip(ranges, plugins or [None] * len(ranges), strict=True)
    ]
    return LoadedStages(
        computes=[stage.compute for stage in loaded],
        vocab_size=checkpoint.config.vocab_size,
        exact_rows=min(stage.exact_rows for stage in loaded),
        shares_blocks=all(stage.shares_blocks for stage in loaded),
    )


def request(
    prompt: Sequence[int], max_tokens: int, sampling: SamplingParams | None = None, **rest: Any
) -> GenerationRequest:
    """A request without text."""
    return GenerationRequest(
        prompt=tuple(prompt),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        text=NoText(),
        **{"stop_ids": frozenset(), **rest},
    )


def limits_of(
    stages: TorchStages | LoadedStages, *, chunk_rows: int, room_blocks: int
) -> RingLimits:
    """What a ring of these stages gives its scheduler, without prefixes on disk."""
    return RingLimits(
        epoch=Epoch(1),
        n_stages=len(stages.computes),
        room_blocks=room_blocks,
        context=stages.context,
        window=stages.window,
        largest_window=stages.largest_window,
        room_states=stages.room_states,
        max_slots=8,
        limits=StepLimits(
            chunk_rows=chunk_rows,
            mixed_rows=chunk_rows // 2,
            exact_rows=stages.exact_rows,
        ),
        shares_blocks=stages.shares_blocks,
    )


def run(
    stages: TorchStages | LoadedStages, *requests: GenerationRequest, **how: Any
) -> list[list[RequestEvent]]:
    """Run requests from outside a loop; see `run_here`."""
    return asyncio.run(run_here(stages, *requests, **how))


async def run_here(
    stages: TorchStages | LoadedStages,
    *requests: GenerationRequest,
    chunk_rows: int = 16,
    room_blocks: int = 64,
    at_once: bool = True,
    prefixes: Prefixes | None = None,
    most_events: Sequence[int] = (),
) -> list[list[RequestEvent]]:
    """Run requests over memory links, all at once or one by one; return the events of each.

    The first ones are given up behind their `most_events`.
    """
    limits = limits_of(stages, chunk_rows=chunk_rows, room_blocks=room_blocks)
    seed = prefixes.seed if prefixes else None
    ring = running_ring(
        stages.computes,
        Scheduler(replace(limits, prefix_seed=seed)),
        vocab_size=stages.vocab_size,
        routing=stages.routing,
        prefixes=prefixes,
    )
    most = dict(zip(map(id, requests), most_events, strict=False))

    async def events_of(engine: Engine, wanted: GenerationRequest) -> list[RequestEvent]:
        found: list[RequestEvent] = []
        async with aclosing(engine.generate(wanted)) as events:
            async for event in events:
                found.append(event)
                if len(found) == most.get(id(wanted)):
                    break
        return found

    async with ring as (engine, _):
        if at_once:
            return await asyncio.gather(*(events_of(engine, wanted) for wanted in requests))
        return [await events_of(engine, wanted) for wanted in requests]


def tokens_of(events: Sequence[RequestEvent]) -> list[int]:
    """The new tokens among the events, the last of which must be the end."""
    assert isinstance(events[-1], GenerationFinished)
    return [event.token_id for event in events if isinstance(event, TokenGenerated)]
