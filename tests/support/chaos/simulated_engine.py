"""A real engine, scheduler and pipeline over a simulated ring that is lost at any moment.

The "model" makes each token from all tokens before (toy_ring.py), and checks what stages rely on.
Whatever is lost, and however often: each request says what it says alone, or a beginning of that
if its client leaves or its deadline passes, and no slot is left taken. One seed is one schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from support.chaos.virtual_time import VirtualLoop, run_virtually
from support.rings.rings import NoText
from support.rings.toy_ring import VOCABULARY, ToyStage, next_token

from shardnet.errors import CancelledRequestError, CapacityError, DeadlineError, ShardnetError
from shardnet.output_params import ALL_ROWS, OutputKind, OutputParams
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.outputs import PromptLogprobsReady, RowsReady
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    Speculation,
    TokenGenerated,
)
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswer
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import ScoredToken, StepArrived, StepFailed
from shardnet.sampling_params import SamplingParams, TokenLogprobs
from shardnet.slot_operations import OpenSequence
from shardnet.types import ANY_ROWS, BLOCK_POSITIONS, Epoch, MicroBatch, SequenceId
from shardnet.wire.payloads.rows import RowBlock

CONTEXT = 6 * BLOCK_POSITIONS
FAILURE = "a stage ran out of memory"


class WildGuesser:
    """Drafts at random, often rightly: the vocabulary is small."""

    kinds = range(31)
    flies = True

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        if self._chance.random() < 0.5:
            return [next_token([*tokens, *ahead])][:limit]
        return [self._chance.randrange(VOCABULARY) for _ in range(min(limit, 3))]

    def close(self) -> None: ...


class SimulatedRing:
    """One ring: takes steps in order, answers each after a while, none once it is lost.

    Of one that is lost `late`, answers under way still come, to the pipeline that it had. A step
    fails as often as `fails` says.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: RingLimits,
        chance: random.Random,
        tasks: asyncio.TaskGroup,
        *,
        step_s: float,
        fails: float,
    ) -> None:
        self._pipeline = pipeline
        self._epoch = limits.epoch
        self._chance = chance
        self._step_s = step_s
        self._fails = fails
        self.stage = ToyStage(limits.room_blocks, limits.shares_blocks)
        self._opened: dict[SequenceId, OpenSequence] = {}
        self._answers: asyncio.Queue[tuple[float, StepAnswer | StepFailed]] = asyncio.Queue()
        self._taking = tasks.create_task(self._take())
        self._answering = tasks.create_task(self._answer())

    async def lose(self, *, late: bool) -> None:
        """Lose it."""
        self._taking.cancel()
        if late:
            await asyncio.sleep(10 * self._step_s)
        self._answering.cancel()
        await asyncio.wait([self._taking, self._answering])

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrived = await self._pipeline.receive()
            if isinstance(arrived, StepArrived):
                answer = self._compute(arrived.batch)
                due = loop.time() + self._step_s * (0.5 + self._chance.random())
                self._answers.put_nowait((due, answer))
                await asyncio.sleep(self._step_s * self._chance.random() / 4)
            else:
                if isinstance(arrived, OpenSequence):
                    self._opened[arrived.sequence_id] = arrived
                self.stage.carry_out(arrived)

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, answer = await self._answers.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._pipeline.answer(answer)

    def _compute(self, batch: MicroBatch) -> StepAnswer | StepFailed:
        assert batch.epoch == self._epoch
        fails = self._chance.random() < self._fails
        ids = self.stage.compute(batch, fails=fails)
        if fails:
            return StepFailed(step=batch.step, error=CapacityError(FAILURE))
        scored: list[ScoredToken] = []
        blocks: list[RowBlock] = []
        for group in batch.groups:
            opened = self._opened[group.sequence_id]
            tokens = self.stage.slots[group.slot].tokens
            rows = range(group.position, group.position + group.n_rows)
            if opened.outputs.n_prompt_logprobs is not None:
                scored += [
                    ScoredToken(
                        sequence_id=group.sequence_id,
                        position=row,
                        logprobs=TokenLogprobs(token_id=tokens[row], logprob=-1.0, top=()),
                    )
                    for row in rows
                    if 0 < row < opened.n_prompt
                ]
            if opened.outputs.hidden_rows == ALL_ROWS:
                blocks.append(
                    RowBlock(
                        sequence_id=group.sequence_id,
                        kind=OutputKind.HIDDEN,
                        position=group.position,
                        width=1,
                        payload=b"".join(row_of(tokens[: row + 1]) for row in rows),
                    )
                )
        return StepAnswer(
            epoch=batch.epoch,
            step=batch.step,
            token_ids=ids,
            logprobs=[None] * len(ids),
            timings=(),
            prompt_logprobs=scored,
            blocks=blocks,
        )


@dataclass(slots=True, kw_only=True)
class Story:
    """One request: when it comes, when its client leaves (after so many events), what it heard."""

    request: GenerationRequest
    arrives_s: float
    leaves_after: int | None = None
    cancelled_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    rows: bytes = b""
    finished: bool = False
    error: ShardnetError | None = None

    def take(self, event: RequestEvent) -> None:
        assert not self.finished, "an event after the end"
        match event:
            case TokenGenerated(token_id=token_id):
                self.tokens.append(token_id)
            case PromptLogprobsReady(logprobs=logprobs):
                self.scored += [entry.token_id for entry in logprobs]
            case RowsReady(block=block):
                assert block.position * block.row_bytes == len(self.rows), "rows twice or not"
                self.rows += bytes(block.payload)
            case GenerationFinished():
                self.finished = True
            case _:
                pass

    def check(self) -> str:
        """Compare with what it says alone; return how it ended."""
        request, prompt = self.request, list(self.request.prompt)
        alone = said_alone(request)
        assert self.tokens == alone[: len(self.tokens)], f"{self.tokens} is not in {alone}"
        whole = prompt + self.tokens
        assert self.scored == prompt[1 : 1 + len(self.scored)]
        n_rows = len(self.rows) // 4
        assert self.rows == b"".join(row_of(whole[: n + 1]) for n in range(n_rows))
        if self.finished:
            assert self.tokens == alone, f"ended after {len(self.tokens)} of {len(alone)} tokens"
            if request.outputs.n_prompt_logprobs is not None:
                assert len(self.scored) == len(prompt) - 1
            if request.outputs.hidden_rows is not None:
                assert n_rows == max(len(prompt), len(whole) - 1)
            return "finished"
        if self.error is None:
            assert self.leaves_after is not None
            return "left"
        match self.error:
            case CancelledRequestError():
                assert self.cancelled_s is not None
            case DeadlineError():
                assert request.deadline_s is not None
            case CapacityError():
                pass
            case _:
                raise self.error
        return type(self.error).__name__


def said_alone(request: GenerationRequest) -> list[int]:
    """What a request says when nothing happens to it."""
    tokens = list(request.prompt)
    while len(tokens) < min(len(request.prompt) + request.max_tokens, CONTEXT):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt) :]


def row_of(tokens: Sequence[int]) -> bytes:
    """The hidden state behind the last of some tokens."""
    return struct.pack("<f", float(sum(tokens) + 1000 * len(tokens)))


def draw_stories(chance: random.Random) -> list[Story]:
    """Requests that share beginnings, of all lengths and kinds."""
    stem = [chance.randrange(VOCABULARY) for _ in range(3 * BLOCK_POSITIONS)]
    stories = []
    for _ in range(chance.randint(1, 5)):
        own = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))]
        prompt = stem[: chance.choice([0, 0, 5, BLOCK_POSITIONS, 3 * BLOCK_POSITIONS])] + own
        guesses = Speculation(
            make_draft_source=lambda wake: WildGuesser(chance), most=chance.randint(1, 4)
        )
        exactly = chance.random() < 0.2
        outputs = OutputParams(
            n_prompt_logprobs=chance.choice([None, None, None, 0]),
            hidden_rows=chance.choice([None, None, None, ALL_ROWS]),
        )
        request = GenerationRequest(
            prompt=tuple(prompt),
            sampling=SamplingParams(),
            max_tokens=chance.choice([0, 1, 4, 12, 30]),
            stop_ids=frozenset(chance.choice([(), (), (3,)])),
            text=NoText(),
            priority=chance.choice([0, 0, 1]),
            deadline_s=chance.choice([None, None, None, 0.5]),
            speculation=guesses if not exactly and chance.random() < 0.2 else None,
            deterministic=exactly,
            outputs=outputs,
        )
        stories.append(
            Story(
                request=request,
                arrives_s=chance.random() * chance.choice([0.0, 0.3]),
                leaves_after=chance.choice([None, None, None, None, chance.randint(1, 12)]),
                cancelled_s=chance.choice([None, None, None, None, chance.random()]),
            )
        )
    return stories


class Simulation:
    """One schedule: requests, and rings that come and go."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.stories = draw_stories(self._chance)
        self.n_lost = 0
        self._epoch, self._max_slots = 0, 1

    async def run(self) -> Counter[str]:
        """Run it to its end, and check everything. Returns how the requests ended."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        async with asyncio.TaskGroup() as self._tasks:
            await self._run()
        return Counter(story.check() for story in self.stories)

    async def _run(self) -> None:
        limits = self._limits()
        self._max_slots = self._chance.randint(1, 4)
        limits = replace(limits, max_slots=self._max_slots)
        scheduler = Scheduler(limits)
        self.engine = Engine(
            scheduler=scheduler,
            make_pipeline=self._pipeline(limits),
            clock_ns=self._loop.time_ns,
        )
        self._ring = self._new_ring(self.engine.pipeline, limits)
        telling = [self._tasks.create_task(self._tell(story)) for story in self.stories]
        await asyncio.wait([*telling, self._tasks.create_task(self._faults())])
        await self._check_nothing_left(scheduler)

    async def _tell(self, story: Story) -> None:
        await asyncio.sleep(story.arrives_s)
        n_events = 0
        if story.cancelled_s is not None:
            self._loop.call_later(story.cancelled_s, self._cancel_any)
        try:
            asking = self.engine.generate(story.request)
            async with contextlib.aclosing(asking):
                async for event in asking:
                    story.take(event)
                    n_events += 1
                    if n_events == story.leaves_after and not story.finished:
                        return
        except ShardnetError as error:
            story.error = error

    def _cancel_any(self) -> None:
        """Cancel a request that may be cancelled: one whose prompt is as long as no other's."""
        lengths = Counter(len(story.request.prompt) for story in self.stories)
        mine = {
            len(story.request.prompt): story
            for story in self.stories
            if story.cancelled_s is not None and lengths[len(story.request.prompt)] == 1
        }
        for progress in self.engine.requests:
            if progress.n_prompt in mine:
                self.engine.cancel(SequenceId(progress.sequence))
                return

    async def _faults(self) -> None:
        """Lose the ring now and then, now and then again before there is another one."""
        chance = self._chance
        for _ in range(chance.randint(1, 4)):
            await asyncio.sleep(chance.random() * chance.choice([0.02, 0.3]))
            self.n_lost += 1
            self.engine.suspend("a node was lost", expected_s=1.0)
            await self._ring.lose(late=chance.random() < 0.3)
            await asyncio.sleep(chance.choice([0.0, chance.random()]))
            if chance.random() < 0.3:
                self.engine.suspend("another node was lost")
                await asyncio.sleep(chance.random())
            self._resume()

    def _resume(self) -> None:
        limits = self._limits()
        pipeline = self.engine.new_pipeline(self._pipeline(limits))
        self._ring = self._new_ring(pipeline, limits)
        self.engine.resume(pipeline, limits)

    def _limits(self) -> RingLimits:
        chance = self._chance
        self._epoch += 1
        return RingLimits(
            epoch=Epoch(self._epoch),
            n_stages=chance.randint(1, 4),
            room_blocks=chance.choice([6, 6, 7, 12, 40]),
            context=CONTEXT,
            max_slots=self._max_slots,
            limits=StepLimits(
                chunk_rows=8,
                mixed_rows=chance.choice([2, 8]),
                exact_rows=chance.choice([1, ANY_ROWS]),
            ),
        )

    def _pipeline(self, limits: RingLimits):  # type: ignore[no-untyped-def]
        return lambda on_answered, on_failed: Pipeline(
            epoch=limits.epoch,
            vocab_size=VOCABULARY,
            clock_ns=self._loop.time_ns,
            on_answered=on_answered,
            on_failed=on_failed,
        )

    def _new_ring(self, pipeline: Pipeline, limits: RingLimits) -> SimulatedRing:
        return SimulatedRing(
            pipeline,
            limits,
            self._chance,
            self._tasks,
            step_s=self._chance.choice([0.001, 0.02]),
            fails=self._chance.choice([0.0, 0.0, 0.0, 0.02]),
        )

    async def _check_nothing_left(self, scheduler: Scheduler) -> None:
        """Nothing runs, waits or is booked but warm slots, and the stage has just those."""
        assert scheduler.n_active == 0
        assert not self.engine.requests
        assert scheduler.queue.kv_blocks.booked_blocks == scheduler.queue.kv_blocks.warm_blocks
        await asyncio.sleep(60.0)  # what was sent last arrives
        slots = self._ring.stage.slots
        assert all(slot.owner is None for slot in slots.values()), "a slot is taken for ever"
        assert self._ring.stage.n_blocks <= scheduler.queue.kv_blocks.warm_blocks
        await self._ring.lose(late=False)


def simulate(seed: int) -> Counter[str]:
    """Run the schedule of a seed. Raises whatever is not as it should be."""
    simulation = Simulation(seed)
    ends = run_virtually(simulation.run())
    ends["rings lost"] = simulation.n_lost
    return ends
