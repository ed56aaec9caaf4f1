"""A real engine over stages that take their time for rows, in virtual time.

What it says means nothing: how long texts and prompts take beside each other is looked at.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from support.chaos.virtual_time import VirtualLoop
from support.rings.rings import NoText

from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import GenerationRequest, TokenGenerated
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswer, StepAnswered
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import StepArrived, StepFailed
from shardnet.sampling_params import SamplingParams
from shardnet.types import ANY_ROWS, Epoch, MicroBatch, StepId
from shardnet.wire.messages.extras import StageTiming

CONTEXT = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStage:
    """A stage that reads its weights in `read_s` and computes each row in `row_s` meanwhile.

    What rows take beyond reading is added, `more_s` of each step always; a row at position n takes
    n times `position_s` longer.
    """

    read_s: float
    row_s: float
    more_s: float = 0.0
    position_s: float = 0.0

    def step_s(self, batch: MicroBatch) -> float:
        """Seconds of a step."""
        rows_s = self.more_s + sum(
            group.n_rows * (self.row_s + self.position_s * (group.position + group.n_rows / 2))
            for group in batch.groups
        )
        return max(self.read_s, rows_s)


@dataclass(slots=True)
class TimedText:
    """When the tokens of a request came."""

    times_s: list[float] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, now_s: float) -> None:
        """Note a token."""
        self.times_s.append(now_s)
        self._came.set()

    async def reach(self, n_tokens: int) -> None:
        """Wait until it has so many tokens."""
        while len(self.times_s) < n_tokens:
            self._came.clear()
            await self._came.wait()

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Times between tokens, of those that came within a window, in ascending order."""
        return sorted(b - a for a, b in pairwise(self.times_s) if start_s <= a and b <= end_s)


@dataclass(slots=True)
class TimedEngine:
    """An engine whose steps go through the stages in order; `hop_s` is the way from each on.

    Each step of a stage takes up to `jitter` times longer than it should. Where layers keep a state
    there is room for `room_states`; `exact_rows` are those of StepLimits. `text` and `prompt` are
    what is asked for beside the tokens, of requests that make many and of those that make one.
    """

    stages: Sequence[TimedStage]
    hop_s: float = 0.0
    jitter: float = 0.0
    room_states: int | None = None
    exact_rows: int = ANY_ROWS
    text: Mapping[str, Any] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine = field(init=False)
    _epoch: Epoch = field(default_factory=lambda: Epoch(1))
    _taking: asyncio.Task[None] = field(init=False)
    _free_s: list[float] = field(init=False)
    _chance: random.Random = field(default_factory=lambda: random.Random(1))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the stages."""
        loop = _loop()
        self.engine = Engine(
            scheduler=Scheduler(self._limits),
            make_pipeline=self._make_pipeline,
            clock_ns=loop.time_ns,
        )
        self._begin()
        try:
            yield
        finally:
            self._taking.cancel()
            await asyncio.wait([self._taking])

    def replace(self, stages: Sequence[TimedStage]) -> None:
        """Lose the stages, and go on over others."""
        self._taking.cancel()
        self.engine.suspend("a stage was lost")
        self.stages, self._epoch = stages, Epoch(self._epoch + 1)
        self.engine.resume(self.engine.new_pipeline(self._make_pipeline), self._limits)
        self._begin()

    @property
    def _limits(self) -> RingLimits:
        return RingLimits(
            epoch=self._epoch,
            n_stages=len(self.stages),
            room_blocks=4000,
            context=CONTEXT,
            max_slots=64,
            room_states=self.room_states,
            limits=StepLimits(exact_rows=self.exact_rows),
        )

    def _make_pipeline(
        self, on_answered: Callable[[StepAnswered], None], on_failed: Callable[[StepFailed], None]
    ) -> Pipeline:
        return Pipeline(
            epoch=self._epoch,
            vocab_size=1 << 17,
            clock_ns=_loop().time_ns,
            on_answered=on_answered,
            on_failed=on_failed,
        )

    def _begin(self) -> None:
        self._free_s = [0.0] * len(self.stages)
        self._taking = asyncio.create_task(self._take(self.engine.pipeline))

    async def _take(self, pipeline: Pipeline) -> None:
        loop = _loop()
        while True:
            arrived = await pipeline.receive()
            if isinstance(arrived, StepArrived):
                batch = arrived.batch
                at_s, timings = self._compute(batch, loop.time())
                answer = StepAnswer(
                    epoch=batch.epoch,
                    step=StepId(batch.step),
                    token_ids=[7] * batch.n_sampled,
                    logprobs=[None] * batch.n_sampled,
                    timings=timings,
                )
                loop.call_at(at_s, pipeline.answer, answer)

    def _compute(self, batch: MicroBatch, at_s: float) -> tuple[float, tuple[StageTiming, ...]]:
        """Say when a step that is sent comes back, and what each stage says of it."""
        timings = []
        for rank, stage in enumerate(self.stages):
            begin_s = max(at_s, self._free_s[rank])
            took_s = stage.step_s(batch) * (1 + self.jitter * self._chance.random())
            self._free_s[rank] = begin_s + took_s
            timings.append(
                StageTiming(
                    rank=rank,
                    compute_us=int(took_s * 1e6),
                    queue_us=int((begin_s - at_s) * 1e6),
                    arrived_us=int(at_s * 1e6),
                )
            )
            at_s = begin_s + took_s + self.hop_s
        return at_s, tuple(timings)

    async def follow(
        self, text: TimedText, seed: int, n_prompt: int, n_tokens: int, priority: int = 0
    ) -> None:
        """Note when the tokens of a request come."""
        loop = asyncio.get_running_loop()
        request = GenerationRequest(
            prompt=tuple((seed * 104_729 + 7919 * place) % 100_003 for place in range(n_prompt)),
            sampling=SamplingParams(),
            max_tokens=n_tokens,
            stop_ids=frozenset(),
            text=NoText(),
            priority=priority,
            **(self.prompt if n_tokens == 1 else self.text),
        )
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, TokenGenerated):
                    text.take(loop.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """How many times as long everything takes beside each other as alone.

    `medians` and `worst` are of the times between tokens: of each text, and of all; `prompt` is the
    time until all prompts are read.
    """

    medians: tuple[float, ...]
    worst: float
    prompt: float


async def beside(ring: TimedEngine, n_prompts: int, n_prompt: int, n_texts: int) -> Company:
    """Have prompts be read, then texts run, then prompts come beside them."""
    loop = asyncio.get_running_loop()
    async with ring.running():
        alone_s = await _read(ring, 900, n_prompts, n_prompt)
        texts = [TimedText() for _ in range(n_texts)]
        following = [
            asyncio.create_task(ring.follow(text, n, 16, CONTEXT // 2))
            for n, text in enumerate(texts)
        ]
        await asyncio.gather(*(text.reach(40) for text in texts))
        began_s = loop.time()
        prompts_s = await _read(ring, 700, n_prompts, n_prompt)
        for task in following:
            task.cancel()
        await asyncio.wait(following)
    ratios = [_ratios(text, (text.times_s[9], began_s), (began_s, loop.time())) for text in texts]
    return Company(
        medians=tuple(each[len(each) // 2] for each in ratios),
        worst=max(each[-1] for each in ratios),
        prompt=prompts_s / alone_s,
    )


async def during(ring: TimedEngine, n_prompt: int) -> tuple[float, float]:
    """Have a text begin while a prompt is read, and end alone.

    Returns how many times as long as alone the median and the longest time between tokens are.
    """
    loop = asyncio.get_running_loop()
    async with ring.running(), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(_read(ring, 900, 1, n_prompt))
        await asyncio.sleep(1.0)
        text = TimedText()
        following = tasks.create_task(ring.follow(text, 1, 16, CONTEXT // 2, priority=1))
        await reading
        ended_s = loop.time()
        await text.reach(len(text.times_s) + 40)
        following.cancel()
    ratios = _ratios(text, (ended_s, loop.time()), (0.0, ended_s))
    return ratios[len(ratios) // 2], ratios[-1]


async def left_alone(ring: TimedEngine, n_long: int, n_prompt: int) -> float:
    """Have two texts run, one behind a long prompt, which ends beside another prompt.

    Returns how many times as long as alone the median of the other's times between tokens is then.
    """
    loop = asyncio.get_running_loop()
    async with ring.running():
        long, text = TimedText(), TimedText()
        ends = asyncio.create_task(ring.follow(long, 1, n_long, CONTEXT // 8))
        following = asyncio.create_task(ring.follow(text, 2, 16, CONTEXT // 2))
        await text.reach(60)
        reading = asyncio.create_task(_read(ring, 700, 1, n_prompt))
        await text.reach(len(text.times_s) + 100)
        ends.cancel()
        await text.reach(len(text.times_s) + 40)
        left_s = loop.time()
        await text.reach(len(text.times_s) + 100)
        beside_s = (left_s, loop.time())
        await reading
        read_s = loop.time()
        await text.reach(len(text.times_s) + 40)
        following.cancel()
        await asyncio.wait([ends, following])
    ratios = _ratios(text, (read_s, loop.time()), beside_s)
    return ratios[len(ratios) // 2]


async def over_others(ring: TimedEngine, stages: Sequence[TimedStage], n_prompt: int) -> float:
    """Have a text and a prompt run, and their stages be replaced.

    Returns how many times as long as alone over these the text's longest time between tokens is,
    once it was replayed.
    """
    loop = asyncio.get_running_loop()
    async with ring.running():
        text = TimedText()
        following = asyncio.create_task(ring.follow(text, 1, 16, CONTEXT // 2, priority=1))
        await text.reach(40)
        reading = asyncio.create_task(_read(ring, 700, 1, n_prompt))
        await text.reach(56)
        ring.replace(stages)
        await text.reach(len(text.times_s) + 1)
        replayed_s = loop.time()
        await reading
        read_s = loop.time()
        await text.reach(len(text.times_s) + 40)
        following.cancel()
        await asyncio.wait([following])
    return _ratios(text, (read_s, loop.time()), (replayed_s, read_s))[-1]


async def _read(ring: TimedEngine, seed: int, n_prompts: int, n_prompt: int) -> float:
    """Have prompts be read, and forgotten; return the seconds that takes."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    texts = [ring.follow(TimedText(), seed + n, n_prompt, 1) for n in range(n_prompts)]
    await asyncio.gather(*texts)
    took_s = loop.time() - began_s
    ring.engine.drop_warm()
    return took_s


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _ratios(
    text: TimedText, alone: tuple[float, float], company: tuple[float, float]
) -> list[float]:
    """Return the times between tokens in one window to their median in another, ascending."""
    gaps_s = text.gaps_s(*alone)
    return [gap_s / gaps_s[len(gaps_s) // 2] for gap_s in text.gaps_s(*company)]
