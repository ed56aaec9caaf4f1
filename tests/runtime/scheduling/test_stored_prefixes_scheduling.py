"""Sequences that begin with what is on disk: when they are opened, and what is kept of them."""

from __future__ import annotations

from typing import Any

from support.rings.answered_steps import operations, ring_scheduler, run

from shardnet.errors import CapacityError
from shardnet.runtime.scheduling.kv_block_manager import block_keys
from shardnet.runtime.scheduling.sequences import (
    RestorePrefix,
    SendStep,
    SequenceRequest,
)
from shardnet.slot_operations import CloseSequence, OpenSequence
from shardnet.types import SequenceId

ONE, TWO = SequenceId(1), SequenceId(2)
PROMPT = tuple(range(700))


def wanted(sequence_id: SequenceId = ONE, n_stored: int = 512, **rest: Any) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=sequence_id,
        **{"prompt": PROMPT, "max_tokens": 4, "n_stored": n_stored} | rest,
    )


def test_a_sequence_sends_nothing_until_its_beginning_was_read() -> None:
    scheduler = ring_scheduler(room_blocks=16)
    scheduler.submit(wanted())
    scheduler.submit(wanted(TWO, n_stored=0, prompt=(9, 9, 9)))
    first = run(scheduler)
    assert [each for each in first if isinstance(each, RestorePrefix)] == [
        RestorePrefix(sequence_id=ONE, n_positions=512)
    ]
    assert [each.sequence_id for each in operations(first, OpenSequence)] == [TWO]
    assert scheduler.queue.restored(ONE, 512)
    then = run(scheduler)
    [opened] = operations(then, OpenSequence)
    assert (opened.sequence_id, opened.n_kept, opened.is_restored) == (ONE, 512, True)
    rows = [each.batch.groups[0] for each in then if isinstance(each, SendStep)]
    assert (rows[0].position, rows[0].n_rows) == (512, 188)
    [closed] = operations(then, CloseSequence)
    assert closed.stored == block_keys(b"ring", PROMPT, 512)
    assert not scheduler.queue.restored(ONE, 512)


def test_what_cannot_be_read_is_computed_and_tried_once() -> None:
    scheduler = ring_scheduler(room_blocks=16)
    scheduler.submit(wanted())
    run(scheduler)
    assert scheduler.queue.restored(ONE, 0)
    then = run(scheduler)
    [opened] = operations(then, OpenSequence)
    assert (opened.n_kept, opened.is_restored) == (0, False)
    assert len(operations(then, CloseSequence)) == 1


def test_a_sequence_that_is_cancelled_while_it_waits_was_never_opened() -> None:
    scheduler = ring_scheduler(room_blocks=16)
    scheduler.submit(wanted())
    run(scheduler)
    assert scheduler.end(ONE)
    assert not scheduler.queue.restored(ONE, 512)
    assert run(scheduler) == []
    assert scheduler.queue.kv_blocks.booked_blocks == 0


def test_a_sequence_that_is_paused_while_it_waits_is_computed_later() -> None:
    """An older one grows to where there is no room for both."""
    scheduler = ring_scheduler(room_blocks=5)
    scheduler.submit(wanted(ONE, n_stored=0, prompt=PROMPT[:510]))
    steps = [each for each in scheduler.next_instructions() if isinstance(each, SendStep)]
    scheduler.submit(wanted(TWO, prompt=PROMPT[::-1]))
    assert [type(each) for each in scheduler.next_instructions()] == [RestorePrefix]
    for step in steps:
        scheduler.on_tokens(step.batch.step, [7] * step.batch.n_sampled)
    rest = run(scheduler)
    assert [each.sequence_id for each in operations(rest, CloseSequence)] == [ONE, TWO]
    [opened] = operations(rest, OpenSequence)
    assert (opened.sequence_id, opened.n_kept, opened.is_restored) == (TWO, 0, False)
    assert not scheduler.queue.restored(TWO, 512)


def test_a_warm_slot_that_holds_as_much_is_better_than_the_disk() -> None:
    scheduler = ring_scheduler(room_blocks=16)
    scheduler.submit(wanted(n_stored=0))
    run(scheduler)
    scheduler.submit(wanted(TWO))
    [opened] = operations(run(scheduler), OpenSequence)
    assert (opened.n_kept, opened.is_restored) == (699, False)


def test_deterministic_and_whole_prompts_are_computed() -> None:
    for rest in ({"deterministic": True}, {"whole_prompt": True}):
        scheduler = ring_scheduler(room_blocks=16)
        scheduler.submit(wanted(**rest))
        [opened] = operations(run(scheduler), OpenSequence)
        assert opened.n_kept == 0


def test_rows_that_were_not_answered_are_not_kept() -> None:
    """The steps of a prompt that is cancelled are under way: one of them may still fail."""
    scheduler = ring_scheduler(room_blocks=16)
    scheduler.submit(wanted(n_stored=0, prompt=tuple(range(1500))))
    steps = [each for each in scheduler.next_instructions() if isinstance(each, SendStep)]
    assert len(steps) == 2
    scheduler.on_tokens(steps[0].batch.step, [])
    steps += [each for each in scheduler.next_instructions() if isinstance(each, SendStep)]
    scheduler.on_tokens(steps[1].batch.step, [])
    scheduler.end(ONE)
    [closed] = operations(scheduler.next_instructions(), CloseSequence)
    assert closed.n_kept == 512
    assert len(closed.stored) == 2
    scheduler.on_step_failed(steps[2].batch.step, CapacityError("no room"))


def test_short_prompts_and_rings_without_a_disk_keep_nothing() -> None:
    short, without = ring_scheduler(room_blocks=16), ring_scheduler(prefix_seed=None)
    short.submit(wanted(n_stored=0, prompt=PROMPT[:500]))
    without.submit(wanted(n_stored=0))
    for scheduler in (short, without):
        [closed] = operations(run(scheduler), CloseSequence)
        assert closed.stored == ()


def test_a_window_cannot_be_rewound_before_what_was_read() -> None:
    scheduler = ring_scheduler(window=16)
    scheduler.submit(wanted())
    run(scheduler)
    scheduler.queue.restored(ONE, 512)
    run(scheduler)
    [slot] = scheduler.queue.kv_blocks.warm()
    assert scheduler.queue.kv_blocks.floor(slot) == 512


def test_keys_depend_on_the_ring_and_on_every_token_before() -> None:
    tokens = [*range(1024)]
    keys = block_keys(b"a", tokens, 1023)
    assert len(keys) == 3
    assert len({*keys, *block_keys(b"b", tokens, 1024)}) == 7
    tokens[0] = 1
    assert not {*keys} & {*block_keys(b"a", tokens, 1024)}
    tokens[0], tokens[600] = 0, 1
    assert block_keys(b"a", tokens, 1024)[:2] == keys[:2]
    assert not {*keys[2:]} & {*block_keys(b"a", tokens, 1024)}
