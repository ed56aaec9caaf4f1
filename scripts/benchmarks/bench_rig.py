"""What the engine's benchmarks stand on: a ring whose head is this process, and the layers alone.

The other stages are node processes on loopback, as a user has them; the head is a node too, but in
this process, so that every token can be timed where it arrives and texts can be forced.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench_steps import make_step

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.folders import cache_dir, runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import MemoryBudget, find_devices, make_node_id
from shardnet.cluster.node.node import listening
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.planning.planning import Elsewhere
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    Speculation,
    TokenGenerated,
)
from shardnet.sampling_params import SamplingParams
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import LayerRange, SlotId
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.finding.target import local_processes
from shardnet_cli.flags.options import Access

MAX_CONTEXT = 4096


class NoText:
    """A TextAssembler for texts that nobody reads."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Say nothing."""
        return "", False

    def finish(self) -> str:
        """Say nothing."""
        return ""


@asynccontextmanager
async def open_ring(
    checkpoint: Path,
    n_stages: int,
    threads: int,
    *,
    mtp: bool = False,
    most_positions: int = MAX_CONTEXT,
) -> AsyncIterator[Engine]:
    """Give the engine of a ring over `n_stages` nodes; see open_head."""
    async with open_head(checkpoint, n_stages, threads, mtp=mtp, most_positions=most_positions) as (
        engine,
        _,
        _,
    ):
        yield engine


@asynccontextmanager
async def open_head(
    checkpoint: Path,
    n_stages: int,
    threads: int,
    *,
    mtp: bool = False,
    most_positions: int = MAX_CONTEXT,
) -> AsyncIterator[tuple[Engine, str, ModelChoice]]:
    """Give engine, address and choice of a ring over nodes of which this process is the first.

    The context is the model's, at most `most_positions`.
    """
    access = Access(key_file="", insecure=True)
    opened = Checkpoint.open(checkpoint)
    context = min(most_positions, opened.config.max_positions)
    settings = NodeSettings(
        node=make_node_id(),
        name="bench",
        budget=MemoryBudget(device=find_devices("cpu")[0], asked_bytes=None),
        threads=threads,
        peers=(),
        local_nodes=LocalNodes(runtime_dir(os.environ)),
        cache=cache_dir(os.environ),
        models=ModelCache(cache_dir(os.environ)),
        log=lambda line: None,
    )
    async with (
        local_processes(n_stages - 1, threads, access) as others,
        listening(settings, "127.0.0.1", 0) as node,
    ):
        choice = ModelChoice(
            model=str(checkpoint),
            nodes=[node.address, *others],
            threads=threads,
            context=context,
            mtp=mtp,
        )
        async with node.head.lead(
            choice, on_plan=lambda plan: None, on_progress=lambda rank, phase, done, total: None
        ) as lead:
            assert not isinstance(lead, Elsewhere)
            yield lead.ring.engine, node.address, choice


@dataclass(slots=True)
class Stream:
    """When the tokens of a request came, in seconds, and when it was asked for."""

    asked_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0] - self.asked_s

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first."""
        return (len(self.times_s) - 1) / (self.times_s[-1] - self.times_s[0])

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Times between tokens, of those that came within a window."""
        inside = [t for t in self.times_s if start_s <= t <= end_s]
        return [b - a for a, b in itertools.pairwise(inside)]


def request(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    speculation: Speculation | None = None,
    deterministic: bool = False,
    sampling: SamplingParams | None = None,
) -> GenerationRequest:
    """Ask greedily, or as `sampling` says, without stop ids."""
    return GenerationRequest(
        prompt=tuple(prompt),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        text=NoText(),
        speculation=speculation,
        deterministic=deterministic,
    )


async def follow(
    engine: Engine,
    asked: GenerationRequest,
    stream: Stream | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Stream:
    """Run a request and note when its tokens come."""
    stream = stream or Stream(time.perf_counter())
    async for event in engine.generate(asked):
        if isinstance(event, TokenGenerated):
            stream.times_s.append(time.perf_counter())
            stream.tokens.append(event.token_id)
            on_token()
        elif isinstance(event, GenerationFinished):
            stream.n_drafted, stream.n_accepted = event.timing.n_drafted, event.timing.n_accepted
    return stream


async def follow_all(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Stream]:
    """Run requests at once."""
    return await asyncio.gather(*(follow(engine, one) for one in asked))


def make_prompt(seed: int, n_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that no other seed begins with."""
    first = seed * 104_729 + 13
    return [(place * 7919 + first) % (vocab_size - 10) + 5 for place in range(n_tokens)]


class Alone:
    """The layers of a range called directly, without scheduler, wire or sampler."""

    def __init__(
        self,
        checkpoint: Path,
        threads: int,
        layers: LayerRange | None = None,
        room_blocks: int = 40,
    ) -> None:
        torch.set_num_threads(threads)
        opened = Checkpoint.open(checkpoint)
        config = opened.config
        self.choice: KernelChoice = probe(torch.device("cpu"), "auto", config.checkpoint_dtype)
        self.vocab_size = config.vocab_size
        self.model: StageModel = load_stage(
            opened,
            layers or LayerRange(0, config.n_layers),
            choice=self.choice,
            device=torch.device("cpu"),
            room_blocks=room_blocks,
            context=min(MAX_CONTEXT, config.max_positions),
            progress=lambda done, total: None,
        )

    def prefill_s(self, prompt: Sequence[int], chunk_rows: int, *, start: int = 0) -> float:
        """Seconds to prefill `prompt` from position `start` on, in slot 0."""
        if not start:
            self.model.kv.free(SlotId(0))
        began = time.perf_counter()
        for place in range(0, len(prompt), chunk_rows):
            rows = prompt[place : place + chunk_rows]
            self._run([(0, start + place, rows)], n_sampled=int(place + len(rows) == len(prompt)))
        return time.perf_counter() - began

    def step_s(self, n_rows: int, position: int, n_steps: int) -> float:
        """Mean seconds of a step with one row each of `n_rows` sequences, from `position` on."""
        for slot in range(n_rows):
            self.model.kv.ensure(SlotId(slot), position + n_steps)
        began = time.perf_counter()
        for step in range(n_steps):
            self._run([(slot, position + step, [7 + slot]) for slot in range(n_rows)], n_sampled=1)
        return (time.perf_counter() - began) / n_steps

    def free(self) -> None:
        """Free all slots."""
        self.model.kv.clear()

    def products_s(self, n_rows: int, n_passes: int) -> float:
        """Mean seconds of all linear products of the model at `n_rows` rows, and nothing else."""
        found = _linears(self.model.family)
        linears = [*{id(linear): linear for linear in found}.values()]  # several parts know each
        inputs = {
            linear.shape[1]: torch.randn(n_rows, linear.shape[1]).to(self.model.dtype)
            for linear in linears
        }
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(n_passes):
                for linear in linears:
                    linear(inputs[linear.shape[1]])
            return (time.perf_counter() - began) / n_passes

    def _run(self, groups: Sequence[tuple[int, int, Sequence[int]]], *, n_sampled: int) -> None:
        logits = self.model.forward(make_step(groups, n_sampled=n_sampled), None)
        if n_sampled:
            logits.argmax(-1)


def _linears(part: object) -> list:  # type: ignore[type-arg]
    """Every linear product inside a family's stage."""
    if isinstance(part, list | tuple):
        return [linear for item in part for linear in _linears(item)]
    if isinstance(getattr(part, "shape", None), tuple) and callable(part):
        return [part]
    if hasattr(part, "__dict__") and type(part).__module__.startswith("shardnet."):
        return [linear for value in vars(part).values() for linear in _linears(value)]
    return [linear for value in _slots_of(part) for linear in _linears(value)]


def _slots_of(part: object) -> list[object]:
    return [getattr(part, name) for name in getattr(part, "__dataclass_fields__", ())]
