"""What a request tells of the stages it ran on."""

from __future__ import annotations

import pytest
from support.rings.rings import NoText

from shardnet.runtime.engine.live_request import (
    ALONE_POSITIONS,
    FEWEST_ALONE,
    LiveRequest,
    LiveRequests,
)
from shardnet.runtime.engine.requests import GenerationFinished, GenerationRequest
from shardnet.runtime.ring.pipeline import StepAnswer, StepAnswered
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, NgramDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import FinishReason
from shardnet.runtime.scheduling.step_cost import RingLimits, StepCost
from shardnet.sampling_params import SamplingParams
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId
from shardnet.wire.messages.extras import StageTiming

PROMPT = (1, 2, 3)
SEQUENCE = SequenceId(1)


def step(position: int, compute_us: tuple[int, int], n_rows: int = 1) -> StepAnswered:
    group = RowGroup(
        sequence_id=SequenceId(1), slot=SlotId(0), position=position, n_rows=1, n_sampled=1
    )
    timings = [StageTiming(r, us, 9, 0) for r, us in enumerate(compute_us)]
    return StepAnswered(
        batch=MicroBatch(
            epoch=Epoch(1), step=StepId(1), groups=(group,) * n_rows, token_ids=(0,) * n_rows
        ),
        answer=StepAnswer(
            epoch=Epoch(1), step=StepId(1), token_ids=(), logprobs=(), timings=tuple(timings)
        ),
        round_trip_us=9999,
    )


def live_request(drafter: AdaptiveDrafter | None = None) -> LiveRequest:
    request = GenerationRequest(
        prompt=PROMPT,
        sampling=SamplingParams(),
        max_tokens=9,
        stop_ids=frozenset(),
        text=NoText(),
    )
    return LiveRequest(request=request, drafter=drafter, submitted_ns=0)


def alone_s(steps: list[StepAnswered]) -> tuple[float, ...]:
    """Return what a request of these steps tells at its end."""
    live = live_request()
    for answered in steps:
        live.take_step(answered.batch.groups[0], answered)
    live.finish(FinishReason.LENGTH, 1)
    event = live.events.get_nowait()
    assert isinstance(event, GenerationFinished)
    return event.alone_s


def test_the_usual_time_of_a_stage_is_told_by_a_request_that_was_alone() -> None:
    prompt = step(0, (90_000, 90_000), n_rows=3)
    steps = [step(len(PROMPT) + i, (2000, 3000)) for i in range(FEWEST_ALONE)]
    first = step(len(PROMPT), (500_000, 3000))
    late = step(ALONE_POSITIONS, (9000, 9000))
    assert alone_s([prompt, first, *steps, *[late] * 40]) == pytest.approx((0.002, 0.003))
    assert alone_s([prompt, *steps[1:]]) == (), "too few"
    assert alone_s([prompt, *steps, step(50, (2000, 3000), n_rows=2)]) == (), "not alone"


def rows(n_rows: int, n_sampled: int) -> RowGroup:
    return RowGroup(
        sequence_id=SEQUENCE, slot=SlotId(0), position=0, n_rows=n_rows, n_sampled=n_sampled
    )


@pytest.mark.parametrize("pause", ["prompt", "recovery", "slow steps", "slow steps with drafts"])
def test_drafts_are_not_blamed_for_the_time_of_prompts_and_recoveries(pause: str) -> None:
    cost, now_s = StepCost(), 1.0
    for n_rows in (1, 8):
        cost.learn(n_rows, 0.01 + n_rows / 10_000)
    drafter = AdaptiveDrafter(draft_source=NgramDrafts(), cost=cost)
    scheduler = Scheduler(
        RingLimits(epoch=Epoch(1), n_stages=1, room_blocks=8, context=256, max_slots=1)
    )
    requests = LiveRequests(scheduler=scheduler, clock_ns=lambda: int(now_s * 1e9))
    live = requests[SEQUENCE] = live_request(drafter)
    group, n_tokens = rows(1, 1), 1
    if pause == "prompt":
        group, n_tokens = rows(256, 0), 0
    for _ in range(3):
        if pause == "slow steps with drafts":
            drafter.learn(1, 0)
        requests.note_pace(group, n_tokens)
        now_s += 5
        if pause == "recovery":
            live.suspend("a node was lost", 1.0, 0)
    requests.note_pace(rows(256, 1) if pause == "prompt" else group, 1)
    assert bool(drafter.propose([1, 2, 3] * 9, 4)) is (pause != "slow steps with drafts")
