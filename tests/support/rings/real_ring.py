"""A ring of real stages in one process: checkpoint, kernels, KV cache and sampler as they are."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.models.fake_tower import FirstPart
from support.rings.rings import NoText, running_ring
from support.rings.stage_chain import ROOM_BLOCKS, StageChain, even_split

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.sampling.sampler import Sampler
from shardnet.model.vision.picture import PictureEncoder, PictureProcessor, PreparedPicture
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestPicture,
    Speculation,
    TokenGenerated,
)
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import PicturePlace
from shardnet.types import Epoch, WireDType

N_LAYERS = 4
CONTEXT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a request gave."""

    tokens: list[int]
    n_drafted: int
    n_accepted: int


@asynccontextmanager
async def real_ring(
    folder: Path,
    choice: KernelChoice,
    *,
    n_stages: int = 2,
    room_blocks: int = ROOM_BLOCKS,
    n_layers: int = N_LAYERS,
    encoder: PictureEncoder | None = None,
) -> AsyncIterator[Engine]:
    """Run a checkpoint, by default a tiny one of 4 layers, as a ring over memory links."""
    chain = StageChain.load(folder, even_split(n_layers, n_stages), choice)
    computes = [
        TorchCompute(
            stage,
            Sampler(stage.vocab_size) if stage.last else None,
            wire_dtype=WireDType.own(choice.dtype),
        )
        for stage in chain.stages
    ]
    scheduler = Scheduler(
        RingLimits(
            epoch=Epoch(1),
            n_stages=n_stages,
            room_blocks=room_blocks,
            context=CONTEXT,
            max_slots=16,
            room_states=64 if Checkpoint.open(folder).config.has_state else None,
            rewinds=Checkpoint.open(folder).config.rewinds,
            limits=StepLimits(exact_rows=min(stage.exact_rows for stage in chain.stages)),
        )
    )
    vocab_size = chain.stages[0].vocab_size
    chain.stages[0].encoder = encoder
    stage = FirstPart(computes[0])
    async with running_ring(computes, scheduler, vocab_size=vocab_size, stage=stage) as (ring, _):
        yield ring


def ask(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    deterministic: bool = False,
    speculation: Speculation | None = None,
) -> GenerationRequest:
    """A request without stop ids."""
    return GenerationRequest(
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=temperature, seed=seed),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        text=NoText(),
        deterministic=deterministic,
        speculation=speculation,
    )


def pictured(
    processor: PictureProcessor, *parts: int | NDArray[np.uint8], max_tokens: int = 8
) -> GenerationRequest:
    """A request whose prompt consists of token ids and pictures."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        prepared = processor.prepare(part)
        pictures.append(_picture(prepared, len(ids), part))
        ids += prepared.token_ids
    return replace(ask(ids, max_tokens), pictures=tuple(pictures))


def _picture(prepared: PreparedPicture, start: int, rgb: NDArray[np.uint8]) -> RequestPicture:
    rows = prepared.is_row.nonzero()[0]

    async def prepare() -> PreparedPicture:
        return prepared

    place = PicturePlace(
        position=start + int(rows[0]),
        n_positions=int(rows[-1] - rows[0]) + 1,
        grid=prepared.grid,
        see_each_other=prepared.see_each_other,
        digest=hashlib.sha256(rgb.tobytes()).digest()[:16],
    )
    return RequestPicture(place=place, prepare=prepare)


def guessing(request: GenerationRequest, speculation: Speculation) -> GenerationRequest:
    """The same request with speculation."""
    return replace(request, speculation=speculation)


async def say(engine: Engine, request: GenerationRequest) -> Said:
    """Run one request to its end."""
    tokens = []
    async for event in engine.generate(request):
        if isinstance(event, TokenGenerated):
            tokens.append(event.token_id)
        elif isinstance(event, GenerationFinished):
            timing = event.timing
    return Said(tokens=tokens, n_drafted=timing.n_drafted, n_accepted=timing.n_accepted)


async def say_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Said]:
    """Run requests at once."""
    return await asyncio.gather(*(say(engine, request) for request in requests))
