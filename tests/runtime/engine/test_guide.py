"""When masks are made on the event loop and when on a thread, and how a request ends by them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.rings.fake_ring import fake_ring, request_of
from support.rings.rings import NoText

from shardnet.constraints import MaskForm, TokenMask
from shardnet.errors import ShardnetError, UsageError
from shardnet.runtime.engine.guide import SLOW_FOR, SLOW_NS, Constrained, Guide
from shardnet.runtime.engine.requests import GenerationFinished, TextAssembler, TokenGenerated
from shardnet.runtime.scheduling.sequences import FinishReason
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.runtime.stage.executor import Executor

ANY = TokenMask(MaskForm.FORBIDDEN, b"")


class Panic(BaseException):
    """What a Rust library raises when it panics: no Exception."""


@dataclass
class Counting:
    """A matcher that is complete after `n_tokens`, slow from `slow_at` on, or fails at `fails_at`.

    `clock_ns` is a clock that its masks alone move.
    """

    n_tokens: int = 1000
    slow_at: int = -1
    fails_at: int = -1
    forced_fails_at: int = -1
    taken: list[int] = field(default_factory=list)
    now_ns: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.taken) >= self.n_tokens

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)

    def mask(self) -> TokenMask:
        if len(self.taken) == self.slow_at:
            self.now_ns += 2 * SLOW_NS
        if len(self.taken) == self.fails_at:
            raise UsageError("it became too complex")
        return ANY

    def masks(self, drafts: Sequence[int]) -> list[TokenMask]:
        return [ANY] * (1 + len(drafts))

    def forced(self, limit: int) -> list[int]:
        if len(self.taken) == self.forced_fails_at:
            raise Panic("a bug of llguidance")
        return []

    def clock_ns(self) -> int:
        return self.now_ns


def test_what_was_slow_once_is_made_on_the_thread_for_a_while() -> None:
    async def scenario() -> None:
        thread = Executor("masks")
        ready = asyncio.Event()
        matcher = Counting(slow_at=2)
        guide = Guide(
            Constrained(matcher=matcher, thread=thread),
            cost=StepCost(),
            clock_ns=matcher.clock_ns,
            soon=asyncio.get_running_loop().call_soon,
            ready=ready.set,
            ended=lambda error: pytest.fail(f"it ended: {error}"),
        )
        assert guide.prepare()
        for _ in range(2):
            assert not guide.take(7)
            assert guide.prepare()  # also the slow one: nobody knew
        assert len(guide.masks([1, 2])) == 1  # no drafts then
        for _ in range(SLOW_FOR):
            assert not guide.take(7)
            assert not guide.prepare()
            assert not guide.prepare()  # it waits for one mask, not for two
            await ready.wait()
            ready.clear()
            assert guide.prepare()
        assert not guide.take(7)
        assert guide.prepare()
        assert len(guide.masks([1, 2])) == 3
        assert len(matcher.taken) == 3 + SLOW_FOR
        thread.close()

    asyncio.run(scenario())


class FailingEnd(NoText):
    """A text whose end cannot be told."""

    def finish(self) -> str:
        raise Panic("a bug of a tokenizer")


def generated(
    matcher: Counting, max_tokens: int = 20, text: TextAssembler | None = None
) -> tuple[int, FinishReason | str]:
    """Run a request on a ring of two stages beside a free one; how many tokens, and why it ended.

    Every mask takes long where the matcher's clock says so.
    """

    async def scenario() -> tuple[int, FinishReason | str]:
        thread = Executor("masks")
        n_tokens = 0
        async with asyncio.timeout(60), fake_ring(2, over="memory") as ring:
            ring.engine._clock_ns = matcher.clock_ns
            constrained = Constrained(matcher=matcher, thread=thread)
            asked = replace(request_of([1, 2, 3], max_tokens), constrained=constrained)
            asked = replace(asked, text=text or asked.text)
            free = asyncio.create_task(ring.generate([4, 5], 30))
            try:
                async for event in ring.engine.generate(asked):
                    n_tokens += isinstance(event, TokenGenerated)
                    if isinstance(event, GenerationFinished):
                        return n_tokens, event.reason
            except ShardnetError as error:
                return n_tokens, error.message
            finally:
                assert len(await free) == 30
                thread.close()
        raise AssertionError("no end")

    return asyncio.run(scenario())


@pytest.mark.parametrize("slow_at", [-1, 2])
def test_a_request_ends_where_nothing_may_follow(slow_at: int) -> None:
    assert generated(Counting(n_tokens=5, slow_at=slow_at)) == (5, FinishReason.STOP)
    assert generated(Counting(slow_at=slow_at)) == (20, FinishReason.LENGTH)
    both = Counting(n_tokens=6, slow_at=slow_at)
    assert generated(both, max_tokens=6) == (6, FinishReason.STOP)


@pytest.mark.parametrize("slow_at", [-1, 2])
def test_a_constraint_that_fails_ends_its_request_alone(slow_at: int) -> None:
    assert generated(Counting(fails_at=4, slow_at=slow_at)) == (4, "it became too complex")


def test_forced_text_that_fails_ends_its_request_alone() -> None:
    n_tokens, why = generated(Counting(forced_fails_at=4))
    assert n_tokens == 4
    assert "a bug of llguidance" in str(why)


@pytest.mark.parametrize("slow_at", [-1, 2])
def test_a_text_that_fails_at_its_end_ends_its_request(slow_at: int) -> None:
    """Also where the end turns out on the thread of the masks."""
    n_tokens, why = generated(Counting(n_tokens=5, slow_at=slow_at), text=FailingEnd())
    assert n_tokens == 5
    assert "a bug of a tokenizer" in str(why)
