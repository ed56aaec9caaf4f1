"""An engine that loses its ring and goes on over another one: no token is lost, or made twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.rings import fake_ring as rings
from support.rings.fake_ring import VOCAB, FakeCompute, expected_tokens, fake_ring, request_of
from support.rings.rings import pipeline_maker, running_stages

from shardnet.errors import CapacityError, DeadlineError, PeerFailedError, ShardnetError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import Restoring
from shardnet.runtime.engine.requests import (
    GenerationRequest,
    MadeToken,
    RequestEvent,
    RequestMoved,
    TokenGenerated,
)
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import StepFailed
from shardnet.types import Epoch, LiveState, SequenceId, StepId

DEADLINE_S = 60.0
Q, R, X, A = LiveState.QUEUED, LiveState.RUNNING, LiveState.RECOVERING, LiveState.RESUMED


@pytest.fixture(autouse=True)
def _narrow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "WIDTH", 4)


@asynccontextmanager
async def next_ring(
    engine: Engine, n_stages: int, *, epoch: int = 2, room_blocks: int = 64
) -> AsyncIterator[list[str]]:
    """Have `engine` go on over a ring of `n_stages`; yields what it says of the replay."""
    told: list[str] = []
    limits = RingLimits(
        epoch=Epoch(epoch),
        n_stages=n_stages,
        room_blocks=room_blocks,
        context=1024,
        max_slots=8,
        limits=StepLimits(chunk_rows=64, mixed_rows=64),
    )
    pipeline = engine.new_pipeline(pipeline_maker(Epoch(epoch), VOCAB))
    computes = [FakeCompute(rank, n_stages) for rank in range(n_stages)]
    async with running_stages(computes, pipeline, Epoch(epoch), engine.fail):
        engine.resume(pipeline, limits, on_replayed=lambda: told.append("replayed"))
        yield told


class Running:
    """A request that runs in a task: its events so far."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self.events: list[RequestEvent] = []
        self._grown = asyncio.Event()
        self._engine, self._request = engine, request
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async for event in self._engine.generate(self._request):
            self.events.append(event)
            self._grown.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenGenerated)]

    @property
    def states(self) -> list[LiveState]:
        return [event.state for event in self.events if isinstance(event, RequestMoved)]

    async def until(self, n_tokens: int) -> None:
        while len(self.tokens) < n_tokens:
            self._grown.clear()
            await self._grown.wait()


PROMPTS: Sequence[list[int]] = ([1, 2, 3], [5] * 70, [9, 8])


@pytest.mark.parametrize("n_stages", [1, 2])
def test_requests_go_on_over_another_ring_as_if_nothing_had_happened(n_stages: int) -> None:
    """One waits for a slot when the ring is lost, and one comes while there is none."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(3, over="memory", max_slots=2) as first:
            engine = first.engine
            running = [Running(engine, request_of(prompt, 150)) for prompt in PROMPTS]
            await running[0].until(20)
            engine.suspend("bert was lost", 2.0)
            running.append(Running(engine, request_of([4], 30)))
            engine.suspend("cleo was lost too", 2.0)
            await asyncio.sleep(0)
            n_before = len(running[0].tokens)
            async with next_ring(engine, n_stages) as told:
                await asyncio.gather(*(one.task for one in running))
            assert told == ["replayed"]
            assert n_before < 150
            for one, prompt in zip(running, [*PROMPTS, [4]], strict=True):
                n_tokens = 30 if prompt == [4] else 150
                assert one.tokens == expected_tokens(prompt, n_tokens)
            assert running[0].states[:4] == [R, X, X, A]
            assert {*running[0].states[4:]} == {A}
            assert running[2].states[:3] == [Q, X, X]
            assert running[2].states[-1] == R
            assert running[3].states[0] == Q
            assert running[3].states[-1] == R
            why = [e.why for e in running[0].events if isinstance(e, RequestMoved)]
            assert why[:4] == ["", "bert was lost", "cleo was lost too", ""]
            assert why[4] == f"reading {3 + n_before:,} tokens again"

    asyncio.run(main())


def test_an_answer_begins_with_what_was_made_elsewhere() -> None:
    """Its tokens are told again and not made again; one that was complete ends at once."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(2, over="memory") as ring:
            whole = expected_tokens([1, 2, 3], 40)
            n_stopped = whole.index(whole[9]) + 1
            for n_made, stop_ids, n_said in (
                (25, frozenset[int](), 40),
                (40, frozenset[int](), 40),
                (n_stopped, frozenset([whole[9]]), n_stopped),
            ):
                made = tuple(MadeToken(token_id=token) for token in whole[:n_made])
                request = replace(request_of([1, 2, 3], 40), made=made, stop_ids=stop_ids)
                running = Running(ring.engine, request)
                await running.task
                assert running.tokens == whole[:n_said]
                assert running.states == ([Q, R, R] if n_made == 25 else [Q])
            assert sum(step.n_tokens for step in ring.engine.log.after(0)) == 15

    asyncio.run(main())


def test_a_request_that_can_never_fit_the_next_ring_fails_alone() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(2, over="memory") as first:
            engine = first.engine
            large = Running(engine, request_of([1], 900))
            small = Running(engine, request_of([2], 100))
            await small.until(3)
            engine.suspend("bert was lost")
            async with next_ring(engine, 1, room_blocks=2):
                with pytest.raises(CapacityError, match="the ring has room for 2"):
                    await large.task
                await small.task
            assert small.tokens == expected_tokens([2], 100)

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_found_on_disk_is_computed_on_a_ring_that_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """The ring where it was found is gone; of one whose client leaves at once nothing is left."""

    async def main() -> None:
        was_found = asyncio.Event()

        async def find(self: Restoring, request: GenerationRequest) -> int:
            was_found.set()
            return 512

        monkeypatch.setattr(Restoring, "find", find)
        async with (
            asyncio.timeout(DEADLINE_S),
            fake_ring(2, over="memory", chunk_rows=64) as ring,
        ):
            prompt = [number % 40 for number in range(600)]
            running = Running(ring.engine, request_of(prompt, 3))
            if leaves:
                await was_found.wait()
                running.task.cancel()
                await asyncio.gather(running.task, return_exceptions=True)
                running = Running(ring.engine, request_of(prompt, 3))
            await running.task
            assert running.tokens == expected_tokens(prompt, 3)

    asyncio.run(main())


def test_requests_can_end_while_there_is_no_ring() -> None:
    """By their deadline, by who asked, by who watches; what is given up fails the rest."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(2, over="memory") as first:
            engine = first.engine
            late = Running(engine, replace(request_of([1], 900), deadline_s=0.05))
            watched = Running(engine, request_of([2], 900))
            left = Running(engine, request_of([3], 900))
            last = Running(engine, request_of([4], 900))
            await last.until(1)
            engine.suspend("bert was lost")
            with pytest.raises(DeadlineError):
                await late.task
            assert engine.cancel(SequenceId(2))
            with pytest.raises(ShardnetError, match="cancelled"):
                await watched.task
            left.task.cancel()
            await asyncio.wait([left.task])
            assert engine.n_active == 1
            engine.fail(PeerFailedError("no node is left"))
            with pytest.raises(PeerFailedError, match="no node is left"):
                await last.task

    asyncio.run(main())


def test_answers_of_the_lost_ring_are_dropped() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(2, over="memory") as first:
            engine, lost = first.engine, first.engine.pipeline
            one = Running(engine, request_of([1], 60))
            await one.until(2)
            engine.suspend("bert was lost")
            lost.answer(StepFailed(step=StepId(1), error=ShardnetError("late")))
            assert lost.dropped == {"abandoned": 1}
            async with next_ring(engine, 3):
                await one.task
            assert one.tokens == expected_tokens([1], 60)

    asyncio.run(main())
