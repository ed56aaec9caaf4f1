"""Sequences whose KV cache was moved to the next ring: they go on where they stood."""

from __future__ import annotations

from dataclasses import replace

from shardnet.output_params import OutputParams
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import OperateSlot, SendStep, SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.slot_operations import OpenSequence
from shardnet.types import Epoch, SequenceId

ONE, TWO, SCORED = SequenceId(1), SequenceId(2), SequenceId(3)


def answered(scheduler: Scheduler) -> list[SendStep]:
    """Answer what is sent now with token 7."""
    sent = [each for each in scheduler.next_instructions() if isinstance(each, SendStep)]
    for step in sent:
        scheduler.on_tokens(step.batch.step, [7] * step.batch.n_sampled)
    return sent


def test_who_was_moved_goes_on_and_others_are_computed_again() -> None:
    scheduler = Scheduler(
        RingLimits(epoch=Epoch(1), n_stages=1, room_blocks=16, context=2048, max_slots=4)
    )
    for sequence_id, first in ((ONE, 10), (TWO, 20)):
        prompt = tuple(range(first, first + 300))
        scheduler.submit(SequenceRequest(sequence_id=sequence_id, prompt=prompt, max_tokens=9))
    outputs = OutputParams(n_prompt_logprobs=1)
    long = tuple(range(1500))
    scheduler.submit(
        SequenceRequest(sequence_id=SCORED, prompt=long, max_tokens=9, outputs=outputs)
    )
    while len(scheduler.computed()) < 2:
        answered(scheduler)
    while any(len(one.token_ids) < 301 for one in scheduler.computed()):
        answered(scheduler)
    assert scheduler.n_in_flight == 0
    computed = {one.sequence_id: one for one in scheduler.computed()}
    assert computed.keys() == {ONE, TWO}  # the tail of SCORED has a row that nobody else has
    n_moved = len(computed[ONE].token_ids)
    scheduler.suspend()
    scheduler.queue.moved({ONE: n_moved})
    scheduler.resume(replace(scheduler.ring, epoch=Epoch(2)))
    instructions = scheduler.next_instructions()
    opened = {
        each.operation.sequence_id: (each.operation.is_restored, each.operation.n_kept)
        for each in instructions
        if isinstance(each, OperateSlot) and isinstance(each.operation, OpenSequence)
    }
    assert opened == {ONE: (True, n_moved), TWO: (False, 0), SCORED: (False, 0)}
    groups = [g for each in instructions if isinstance(each, SendStep) for g in each.batch.groups]
    assert {group.position for group in groups if group.sequence_id == ONE} == {n_moved}
    assert {group.position for group in groups if group.sequence_id == TWO} <= {0}


def test_a_sequence_has_nothing_elsewhere_before_its_first_step_was_answered() -> None:
    """Stages may not have come yet to where it begins with what was kept in a slot."""
    ring = RingLimits(epoch=Epoch(1), n_stages=1, room_blocks=40, context=2048, max_slots=4)
    scheduler = Scheduler(ring)
    prompt = tuple(range(300))
    scheduler.submit(SequenceRequest(sequence_id=ONE, prompt=prompt, max_tokens=3))
    while scheduler.n_active:
        answered(scheduler)
    scheduler.submit(SequenceRequest(sequence_id=TWO, prompt=prompt[::-1], max_tokens=500))
    while not any(len(one.token_ids) > 300 for one in scheduler.computed()):
        answered(scheduler)
    [in_flight] = scheduler.next_instructions()
    assert isinstance(in_flight, SendStep)
    scheduler.submit(SequenceRequest(sequence_id=SCORED, prompt=(*prompt, 7, 7, 5), max_tokens=9))
    [opened] = scheduler.next_instructions()  # the step in flight keeps its rows waiting
    assert isinstance(opened, OperateSlot)
    assert isinstance(opened.operation, OpenSequence)
    assert opened.operation.n_kept == 302
    scheduler.on_tokens(in_flight.batch.step, [7])
    assert [one.sequence_id for one in scheduler.computed()] == [TWO]
