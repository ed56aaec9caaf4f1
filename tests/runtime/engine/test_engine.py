"""The engine over a ring that counts: what each request is told, and that nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from support.rings import fake_ring as rings
from support.rings.fake_ring import FakeRing, expected_tokens, fake_ring, request_of
from support.rings.rings import NoText
from support.soak import cases

from shardnet.errors import CheckpointError, DeadlineError, ShardnetError, UsageError
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    RequestMoved,
    Speculation,
    TokenGenerated,
)
from shardnet.runtime.scheduling.drafting import NgramDrafts
from shardnet.types import LiveState

DEADLINE_S = 60.0
FOR_EVER = 900


@pytest.fixture(autouse=True)
def _narrow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "WIDTH", 4)


@asynccontextmanager
async def ring_of_three(*, max_slots: int = 8, room_blocks: int = 64) -> AsyncIterator[FakeRing]:
    async with (
        asyncio.timeout(DEADLINE_S),
        fake_ring(
            3, over="memory", chunk_rows=64, max_slots=max_slots, room_blocks=room_blocks
        ) as ring,
    ):
        yield ring


async def events_of(ring: FakeRing, request: GenerationRequest) -> list[RequestEvent]:
    return [event async for event in ring.engine.generate(request)]


def states(events: Sequence[RequestEvent]) -> list[LiveState]:
    return [event.state for event in events if isinstance(event, RequestMoved)]


async def until_it_runs(events: AsyncIterator[RequestEvent]) -> None:
    async for event in events:
        if isinstance(event, TokenGenerated):
            return


def check_nothing_is_left(ring: FakeRing) -> None:
    """Every slot is free or warm, on the head and, but for the last request's, on every stage."""
    counters = ring.engine.counters
    assert (counters.running, counters.waiting, counters.paused) == (0, 0, 0)
    book = ring.engine._scheduler.queue.kv_blocks
    assert counters.used_blocks == book.warm_blocks
    assert counters.warm_slots == len(book.warm())
    for compute in ring.computes:
        assert len(compute.owners) <= 1


def test_a_request_that_waits_is_told_its_place_until_it_runs() -> None:
    async def main() -> None:
        async with ring_of_three(max_slots=1) as ring:
            first = asyncio.create_task(events_of(ring, request_of([1], 20)))
            others = [
                asyncio.create_task(events_of(ring, request_of([n], 2))) for n in range(2, 11)
            ]
            assert states(await first) == [LiveState.RUNNING]
            *_, last = await asyncio.gather(*others)
            places = [event.ahead for event in last if isinstance(event, RequestMoved)]
            assert places == [8, 4, 2, 1, 0, 0]
            assert states(last) == [LiveState.QUEUED] * 5 + [LiveState.RUNNING]

    asyncio.run(main())


def test_a_request_that_is_refused_gives_its_draft_source_back() -> None:
    """A draft model has few slots: each refused request would take one for ever."""
    closed: list[NgramDrafts] = []

    class Closing(NgramDrafts):
        def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        async with ring_of_three() as ring:
            drafted = Speculation(make_draft_source=lambda wake: Closing())
            refused = replace(request_of([], 3), speculation=drafted)
            with pytest.raises(UsageError, match="empty"):
                await events_of(ring, refused)
            assert len(closed) == 1

    asyncio.run(main())


def test_a_larger_priority_goes_first() -> None:
    async def main() -> None:
        order: list[int] = []

        async def run(ring: FakeRing, priority: int) -> None:
            await events_of(ring, request_of([priority + 5], 3, priority=priority))
            order.append(priority)

        async with ring_of_three(max_slots=1) as ring:
            running = asyncio.create_task(events_of(ring, request_of([1], 30)))
            await asyncio.gather(running, *(run(ring, priority) for priority in (-3, 0, 7, 2)))
            assert order == [7, 2, 0, -3]

    asyncio.run(main())


def test_a_pause_shows_and_changes_no_token() -> None:
    """Room for five blocks, and three sequences that grow to two each: the youngest gives way."""

    async def main() -> None:
        async with ring_of_three(room_blocks=5) as ring:
            prompts = [[n] * 200 for n in (3, 5, 7)]
            ends = await asyncio.gather(
                *(events_of(ring, request_of(prompt, 100)) for prompt in prompts)
            )
            for prompt, events in zip(prompts, ends, strict=True):
                tokens = [e.token_id for e in events if isinstance(e, TokenGenerated)]
                assert tokens == expected_tokens(prompt, 100)
            running, paused, resumed = LiveState.RUNNING, LiveState.PAUSED, LiveState.RESUMED
            assert [states(events) for events in ends] == [
                [running],
                [running],
                [running, paused, resumed],
            ]
            await ring.generate([1], 1)
            check_nothing_is_left(ring)

    asyncio.run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_a_deadline_ends_a_request_that_runs_or_waits(waits: bool) -> None:
    async def main() -> None:
        async with ring_of_three(max_slots=1) as ring:
            async with aclosing(ring.engine.generate(request_of([1], FOR_EVER))) as running:
                if waits:
                    await until_it_runs(running)
                with pytest.raises(DeadlineError, match=r"0\.05 s, after \d+ tokens"):
                    await events_of(ring, request_of([2], FOR_EVER, deadline_s=0.05))
            assert await ring.generate([3], 4) == expected_tokens([3], 4)
            check_nothing_is_left(ring)

    asyncio.run(main())


@pytest.mark.parametrize("deadline_s", [1e9, float("inf"), 3600.0])
def test_a_deadline_that_does_not_come_does_nothing(deadline_s: float) -> None:
    async def main() -> None:
        async with ring_of_three() as ring:
            events = await events_of(ring, request_of([1], 2, deadline_s=deadline_s))
            assert isinstance(events[-1], GenerationFinished)

    asyncio.run(main())


def test_counters_tell_what_is_in_hand() -> None:
    async def main() -> None:
        async with ring_of_three(max_slots=2, room_blocks=9) as ring:
            requests = [request_of([n], FOR_EVER) for n in (1, 2, 3, 4)]
            running = [ring.engine.generate(request) for request in requests]
            for events in running[:2]:
                await until_it_runs(events)
            waiting = [asyncio.create_task(anext(events)) for events in running[2:]]
            await asyncio.gather(*waiting)
            counters = ring.engine.counters
            assert (counters.running, counters.waiting, counters.paused) == (2, 2, 0)
            assert counters.room_blocks == 9
            assert 2 <= counters.used_blocks <= 9
            for events in running:
                await events.aclose()
            before = ring.engine.totals.n_prompts
            for _ in range(2):
                await ring.generate([5] * 40, 1)
            totals = ring.engine.totals
            assert (totals.n_prompts - before, totals.n_prefix_hits) == (2, 1)
            assert 0 < totals.n_prefix_tokens < 40
            assert totals.n_steps >= 2
            assert set(totals.queue_us) == {0, 1, 2}
            check_nothing_is_left(ring)

    asyncio.run(main())


class Customer:
    """Asks for texts of random lengths, and sometimes goes away in the middle."""

    def __init__(self, ring: FakeRing, seed: int) -> None:
        self._ring = ring
        self._chance = random.Random(seed)
        self.n_finished = 0
        self.n_left = 0

    async def come_and_go(self, n_requests: int) -> None:
        for _ in range(n_requests):
            prompt = [self._chance.randrange(50) for _ in range(self._chance.randrange(1, 400))]
            n_tokens = self._chance.choice([1, 5, 30, 300])
            way = self._chance.choice(["stay", "stay", "close", "cancel", "deadline"])
            leave_after = self._chance.randrange(n_tokens)
            if way == "stay":
                assert await self._ring.generate(prompt, n_tokens) == expected_tokens(
                    prompt, n_tokens
                )
                self.n_finished += 1
            else:
                await self._leave(way, prompt, n_tokens, leave_after)
                self.n_left += 1

    async def _leave(self, way: str, prompt: list[int], n_tokens: int, after: int) -> None:
        deadline_s = 0.01 if way == "deadline" else None
        asking = asyncio.create_task(self._ask(prompt, n_tokens, after, deadline_s))
        if way == "cancel":
            for _ in range(after):
                await asyncio.sleep(0)
            asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() or type(asking.exception()) in (type(None), DeadlineError)

    async def _ask(
        self, prompt: list[int], n_tokens: int, after: int, deadline_s: float | None
    ) -> None:
        """Read `after` tokens, which must be the first ones, and go."""
        seen: list[int] = []
        request = request_of(prompt, n_tokens, deadline_s=deadline_s)
        try:
            async with aclosing(self._ring.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokenGenerated):
                        seen.append(event.token_id)
                    if len(seen) == after and deadline_s is None:
                        return
        finally:
            assert seen == expected_tokens(prompt, len(seen))


@pytest.mark.parametrize("seed", cases([1], [2, 3]))
def test_sixteen_clients_come_and_go(seed: int) -> None:
    """Room for a few of them: they wait, are paused, leave; the others see nothing of it."""

    async def main() -> None:
        async with ring_of_three(room_blocks=7, max_slots=6) as ring:
            customers = [Customer(ring, 100 * seed + number) for number in range(16)]
            await asyncio.gather(*(customer.come_and_go(3) for customer in customers))
            n_ends = sum(customer.n_finished + customer.n_left for customer in customers)
            assert n_ends == 48
            assert sum(customer.n_left for customer in customers) > 5
            await ring.generate([1, 2, 3], 2)
            check_nothing_is_left(ring)

    asyncio.run(main())


def test_a_broken_ring_ends_each_request_once() -> None:
    async def main() -> None:
        async with ring_of_three(max_slots=2) as ring:

            async def ends(number: int) -> int:
                try:
                    await ring.generate([number], FOR_EVER)
                except ShardnetError:
                    return 1
                return 0

            running = [asyncio.create_task(ends(number)) for number in range(5)]
            async with aclosing(ring.engine.generate(request_of([9], FOR_EVER))) as events:
                await anext(events)
                ring.engine.fail(ShardnetError("gone"))
                with pytest.raises(ShardnetError, match="gone"):
                    await until_it_runs(events)
            assert await asyncio.gather(*running) == [1] * 5

    asyncio.run(main())


class FailingText(NoText):
    """A tokenizer that cannot decode its `n`th token, or the end of the text if that is 0."""

    def __init__(self, n: int) -> None:
        self._left = n

    def push(self, token_id: int) -> tuple[str, bool]:
        self._left -= 1
        if self._left == 0:
            raise CheckpointError("this token cannot be decoded")
        return super().push(token_id)

    def finish(self) -> str:
        if self._left < 0:
            raise CheckpointError("this end cannot be decoded")
        return super().finish()


@pytest.mark.parametrize(
    ("n", "n_tokens", "words"),
    [(3, 20, "this token"), (20, 20, "this token"), (0, 5, "this end")],
)
def test_text_that_cannot_be_decoded_ends_its_request_alone(
    n: int, n_tokens: int, words: str
) -> None:
    async def main() -> None:
        async with ring_of_three() as ring:
            other = asyncio.create_task(ring.generate([7, 8], 60))
            request = replace(request_of([1], n_tokens), text=FailingText(n))
            with pytest.raises(CheckpointError, match=words):
                await events_of(ring, request)
            assert await other == expected_tokens([7, 8], 60)
            check_nothing_is_left(ring)

    asyncio.run(main())
