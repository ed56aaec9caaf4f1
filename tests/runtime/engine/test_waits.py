"""What requests are told while they wait behind a lost ring, held against how long they do wait.

Time is virtual: a row of a prompt takes as long as the ring says, to the nanosecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from support.chaos.virtual_time import VirtualLoop, run_virtually
from support.rings.fake_ring import VOCAB, request_of

from shardnet.runtime.engine.engine import Engine, MakePipeline
from shardnet.runtime.engine.requests import MadeToken, RequestMoved, TokenGenerated
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswer
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import StepArrived
from shardnet.types import Epoch, LiveState
from shardnet.wire.messages.diagnostics import RingWait

ROW_S = 0.003


class SlowRings:
    """An engine on rings whose rows take their time; `told` is what its requests were told, when.

    Those of a ring of one stage take twice as long as those of two. Its plan predicts `row_s`.
    """

    def __init__(self, tasks: asyncio.TaskGroup, row_s: float = 0.0) -> None:
        self._tasks, self._row_s = tasks, row_s
        self._loop = asyncio.get_running_loop()
        assert isinstance(self._loop, VirtualLoop)
        limits = self._limits(1, 2)
        self.engine = Engine(
            scheduler=Scheduler(limits),
            make_pipeline=self._maker(limits),
            clock_ns=self._loop.time_ns,
        )
        self._stages = tasks.create_task(self._compute(self.engine.pipeline, limits))
        self.told: dict[str, list[tuple[float, RequestMoved | TokenGenerated]]] = {}
        self._asking: list[asyncio.Task[None]] = []
        self._grown = asyncio.Event()

    def _limits(self, epoch: int, n_stages: int) -> RingLimits:
        return RingLimits(
            epoch=Epoch(epoch),
            n_stages=n_stages,
            room_blocks=64,
            context=8192,
            max_slots=8,
            limits=StepLimits(chunk_rows=256, mixed_rows=64),
            row_s=self._row_s,
        )

    def _maker(self, limits: RingLimits) -> MakePipeline:
        assert isinstance(self._loop, VirtualLoop)
        clock_ns: Callable[[], int] = self._loop.time_ns
        return lambda on_answered, on_failed: Pipeline(
            epoch=limits.epoch,
            vocab_size=VOCAB,
            clock_ns=clock_ns,
            on_answered=on_answered,
            on_failed=on_failed,
        )

    async def _compute(self, pipeline: Pipeline, limits: RingLimits) -> None:
        while True:
            arrived = await pipeline.receive()
            if isinstance(arrived, StepArrived):
                batch = arrived.batch
                await asyncio.sleep(2 * ROW_S / limits.n_stages * batch.n_rows)
                pipeline.answer(
                    StepAnswer(
                        epoch=batch.epoch,
                        step=batch.step,
                        token_ids=[7] * batch.n_sampled,
                        logprobs=[None] * batch.n_sampled,
                        timings=(),
                    )
                )

    def ask(self, name: str, n_prompt: int, made: int = 0, token: int = 1) -> None:
        """Have a request run, its prompt of so many tokens, `made` of its own there already."""
        tokens = tuple(MadeToken(token_id=7) for _ in range(made))
        request = replace(request_of([token] * n_prompt, 1000), made=tokens)

        async def run() -> None:
            self.told[name] = []
            async for event in self.engine.generate(request):
                if isinstance(event, RequestMoved | TokenGenerated):
                    self.told[name].append((self._loop.time(), event))
                    self._grown.set()

        self._asking.append(self._tasks.create_task(run()))

    def n_tokens(self, name: str) -> int:
        return sum(isinstance(event, TokenGenerated) for _, event in self.told.get(name, ()))

    async def until(self, name: str, n_tokens: int) -> None:
        while self.n_tokens(name) < n_tokens:
            self._grown.clear()
            await self._grown.wait()

    def resume(self, n_stages: int) -> None:
        """Go on over another ring, of so many stages."""
        limits = self._limits(2, n_stages)
        pipeline = self.engine.new_pipeline(self._maker(limits))
        self._stages.cancel()
        self._stages = self._tasks.create_task(self._compute(pipeline, limits))
        self.engine.resume(pipeline, limits)

    def close(self) -> None:
        for task in (self._stages, *self._asking):
            task.cancel()

    def waits(self, name: str) -> list[tuple[float, RequestMoved]]:
        """What a request was told to wait for, and when."""
        moved = [(at_s, one) for at_s, one in self.told[name] if isinstance(one, RequestMoved)]
        return [(at_s, one) for at_s, one in moved if one.why]


@pytest.mark.parametrize("n_stages", [1, 2])
def test_requests_are_told_how_many_tokens_are_read_again_and_about_how_long(n_stages: int) -> None:
    """Of two that are read one after the other the second waits for both; the ring counts down.

    What it loses beside the text of the first is known when that goes on.
    """

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            rings = SlowRings(tasks)
            engine = rings.engine
            rings.ask("long", 3000)
            rings.ask("short", 900, token=2)
            await rings.until("short", 3)
            n_long, n_short = 3000 + rings.n_tokens("long"), 900 + rings.n_tokens("short")
            assert engine.counters.wait is None
            engine.suspend("bert was lost", 2.0)
            engine.waits.tell("load", "loading 4 layers at anna", 4.0)
            await asyncio.sleep(3.0)
            wait = engine.counters.wait
            assert wait is not None
            assert (wait.kind, wait.what) == ("load", "loading 4 layers at anna")
            assert wait.expected_s == pytest.approx(1.0)
            assert {one.waits_for for one in engine.requests} == {wait.what}
            await asyncio.sleep(3.0)
            assert engine.counters.wait == RingWait(kind="load", what=wait.what)  # it takes longer

            rings.resume(n_stages)
            resumed_s = asyncio.get_running_loop().time()
            wait = engine.counters.wait
            assert wait is not None
            assert wait.kind == "replay"
            assert wait.what == f"reading {n_long + n_short:,} tokens again"
            await rings.until("long", rings.n_tokens("long") + 1)
            await rings.until("short", rings.n_tokens("short") + 2)
            assert engine.counters.wait is None
            assert {one.waits_for for one in engine.requests} == {""}
            for name, n_rows in (("long", n_long), ("short", n_long + n_short)):
                waits = rings.waits(name)
                assert [one.why for _, one in waits[:3]] == [
                    "bert was lost",
                    "loading 4 layers at anna",
                    f"reading {n_rows:,} tokens again",
                ]
                told = [(at_s, one) for at_s, one in waits[2:]]
                assert all(one.state is LiveState.RESUMED for _, one in told)
                ended_s = next(
                    at_s
                    for at_s, one in rings.told[name]
                    if isinstance(one, TokenGenerated) and at_s > resumed_s
                )
                assert len(told) >= 4
                alone_s = 2 * ROW_S / n_stages * n_short
                for at_s, one in told:
                    is_beside = name == "short" and ended_s - at_s > 2 * alone_s
                    strays_s = 0.8 + alone_s * is_beside
                    assert one.expected_s == pytest.approx(ended_s - at_s, rel=0.1, abs=strays_s)
                left = [one.expected_s for _, one in told]
                n_rises = sum(then > before for before, then in pairwise(left))
                assert n_rises <= (name == "short")
                between = [then - at for (at, _), (then, _) in pairwise(told)]
                assert min(between) >= 1.0
            await rings.until("short", 40)
            rings.close()

    run_virtually(main())


def test_an_answer_that_was_begun_elsewhere_says_how_many_tokens_are_read_again() -> None:
    """No rate is known yet: it says none. What it was told of its prompt before stays."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            rings = SlowRings(tasks)
            rings.ask("taken over", 2000, made=20)
            await rings.until("taken over", 21)
            first, *later = rings.waits("taken over")
            assert first[1] == RequestMoved(
                state=LiveState.RUNNING, why="reading 2,020 tokens again", n_kept=0
            )
            assert later
            assert all(one.expected_s for _, one in later)
            await rings.until("taken over", 40)
            rings.close()

    run_virtually(main())


def test_who_comes_while_there_is_no_ring_is_told_what_it_waits_for() -> None:
    """And reads its prompt afterwards, not again."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            rings = SlowRings(tasks)
            rings.ask("first", 10)
            await rings.until("first", 2)
            rings.engine.suspend("bert was lost")
            rings.ask("second", 600, token=2)
            await asyncio.sleep(0.1)
            rings.engine.waits.tell("plan", "asking who is left, and planning", 1.0)
            rings.resume(1)
            await rings.until("second", 40)
            [(_, told)] = rings.waits("second")
            assert (told.state, told.why) == (LiveState.QUEUED, "asking who is left, and planning")
            await rings.until("first", 40)
            rings.close()

    run_virtually(main())


def test_what_a_plan_predicts_counts_until_enough_rows_were_measured() -> None:
    """A few rows say little of many: each step has its own cost too."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            rings = SlowRings(tasks, row_s=0.002)
            rings.ask("kept", 20)
            await rings.until("kept", 300)
            rings.engine.suspend("bert was lost")
            rings.resume(2)
            await rings.until("kept", 301)
            told = rings.waits("kept")[1][1]
            assert told.why == "reading 320 tokens again"
            assert told.expected_s == pytest.approx(320 * 0.002)
            rings.close()

    run_virtually(main())
