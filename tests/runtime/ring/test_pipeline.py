"""The pipeline: answers matched to steps, and what a stuck ring looks like."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from shardnet.errors import CapacityError, RemoteProtocolError, ShardnetError
from shardnet.runtime.ring.pipeline import (
    Pipeline,
    StepAnswer,
    StepAnswered,
    StuckStage,
    step_answer,
)
from shardnet.runtime.stage.compute import (
    Activations,
    ScoredToken,
    StepArrived,
    StepComputed,
    StepFailed,
)
from shardnet.sampling_params import SamplingParams, TokenLogprobs
from shardnet.slot_operations import OpenSequence
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType

SECOND_NS = 10**9


def batch(step: int, n_sampled: int = 1) -> MicroBatch:
    group = RowGroup(
        sequence_id=SequenceId(1), slot=SlotId(0), position=0, n_rows=2, n_sampled=n_sampled
    )
    return MicroBatch(epoch=Epoch(3), step=StepId(step), groups=(group,), token_ids=(1, 2))


def answer(step: int, token_ids: list[int], epoch: int = 3) -> StepAnswer:
    return StepAnswer(
        epoch=Epoch(epoch),
        step=StepId(step),
        token_ids=token_ids,
        logprobs=[None] * len(token_ids),
        timings=(),
    )


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Watched:
    """A pipeline with its clock and what it reported."""

    def __init__(self, chunk_s: float | None = None) -> None:
        self.clock = Clock()
        self.answered: list[StepAnswered] = []
        self.failed: list[StepFailed] = []
        self.pipeline = Pipeline(
            epoch=Epoch(3),
            vocab_size=10,
            clock_ns=self.clock,
            on_answered=self.answered.append,
            on_failed=self.failed.append,
            chunk_s=chunk_s,
        )


def test_inputs_come_out_in_the_order_they_went_in() -> None:
    async def main() -> None:
        watched = Watched()
        opened = OpenSequence(sequence_id=SequenceId(1), slot=SlotId(0), sampling=SamplingParams())
        watched.pipeline.operate(opened)
        watched.pipeline.send(batch(1))
        assert await watched.pipeline.receive() == opened
        arrived = await watched.pipeline.receive()
        assert isinstance(arrived, StepArrived)
        assert arrived.batch == batch(1)

    asyncio.run(main())


def test_an_answer_is_matched_and_timed() -> None:
    watched = Watched()
    watched.pipeline.send(batch(1))
    watched.clock.now_ns = 5_000_000
    watched.pipeline.answer(answer(1, [7]))
    (answered,) = watched.answered
    assert answered.batch == batch(1)
    assert answered.round_trip_us == 5000


def test_a_failed_step_is_reported_once() -> None:
    watched = Watched()
    watched.pipeline.send(batch(1))
    failed = StepFailed(step=StepId(1), error=CapacityError("full"))
    watched.pipeline.answer(failed)
    assert watched.failed == [failed]
    with pytest.raises(RemoteProtocolError, match="not in flight"):
        watched.pipeline.answer(failed)


def test_an_old_epochs_answer_is_dropped_and_counted() -> None:
    watched = Watched()
    watched.pipeline.send(batch(1))
    watched.pipeline.answer(answer(1, [7], epoch=2))
    assert not watched.answered
    assert watched.pipeline.dropped == {"old epoch": 1}
    watched.pipeline.answer(answer(1, [7]))
    assert len(watched.answered) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (answer(2, [7]), "step 2, not in flight"),
        (answer(1, [7, 7]), "sampled 1 rows, the tail answered with 2"),
        (answer(1, []), "answered with 0"),
        (answer(1, [10]), "token 10, the vocabulary has 10"),
        (
            replace(answer(1, [7]), logprobs=[TokenLogprobs(token_id=10, logprob=0.0, top=())]),
            "logprob of token 10",
        ),
        (
            replace(
                answer(1, [7]),
                prompt_logprobs=[
                    ScoredToken(
                        sequence_id=SequenceId(1),
                        position=0,
                        logprobs=TokenLogprobs(token_id=1, logprob=0.0, top=((2**32 - 1, -1.0),)),
                    )
                ],
            ),
            "logprob of token 4294967295",
        ),
    ],
)
def test_a_wrong_answer_is_the_tails_fault(wrong: StepAnswer, message: str) -> None:
    watched = Watched()
    watched.pipeline.send(batch(1))
    with pytest.raises(RemoteProtocolError, match=message):
        watched.pipeline.answer(wrong)
    assert not watched.answered


def test_a_stage_is_stuck_only_when_it_is_really_late() -> None:
    watched = Watched(chunk_s=1.0)
    completed = [5, 4, 4]
    assert watched.pipeline.stuck_stage(completed) is None
    watched.pipeline.send(batch(4))
    watched.clock.now_ns = 8 * SECOND_NS
    watched.pipeline.answer(answer(4, [1]))
    watched.pipeline.send(batch(5))
    watched.clock.now_ns += 79 * SECOND_NS
    assert watched.pipeline.stuck_stage(completed) is None
    watched.clock.now_ns += 2 * SECOND_NS
    stuck = StuckStage(rank=1, step=StepId(5), age_s=81, limit_s=80)
    assert watched.pipeline.stuck_stage(completed) == stuck


@pytest.mark.parametrize(("chunk_s", "limit_s"), [(0.1, 60), (6.0, 60), (90.0, 900), (None, 600)])
def test_the_first_step_is_given_ten_times_what_it_should_take(
    chunk_s: float | None, limit_s: int
) -> None:
    """A chunk of 256 rows takes minutes on a small computer, or where layers come from disk."""
    watched = Watched(chunk_s=chunk_s)
    watched.pipeline.send(batch(1))
    watched.clock.now_ns = (limit_s - 1) * SECOND_NS
    assert watched.pipeline.stuck_stage([1, 0]) is None
    watched.clock.now_ns = (limit_s + 1) * SECOND_NS
    stuck = watched.pipeline.stuck_stage([1, 0])
    assert stuck is not None
    assert stuck.rank == 1


def test_activations_are_no_answer() -> None:
    activations = Activations(payload=b"", dtype=WireDType.FLOAT32, width=1)
    with pytest.raises(ShardnetError, match="returned activations for step 1, not samples"):
        step_answer(StepComputed(batch=batch(1), result=activations, timings=()))
