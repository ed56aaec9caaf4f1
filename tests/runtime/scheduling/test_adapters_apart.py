"""Keys and values that were computed with one adapter are of no use with another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.rings.answered_steps import operations, ring_scheduler, run

from shardnet.runtime.scheduling.kv_block_manager import block_keys
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    SequenceRequest,
)
from shardnet.slot_operations import AdapterUse, CloseSequence, OpenSequence
from shardnet.types import Epoch, SequenceId

PROMPT = tuple(range(700))
NONE: tuple[AdapterUse, ...] = ()
A, B = (AdapterUse(adapter_id="a" * 64, scale=1.0),), (AdapterUse(adapter_id="b" * 64, scale=1.0),)
HALF_A = (AdapterUse(adapter_id="a" * 64, scale=0.5),)


def submit(scheduler: Scheduler, number: int, adapters: tuple[AdapterUse, ...]) -> None:
    scheduler.submit(
        SequenceRequest(
            sequence_id=SequenceId(number), prompt=PROMPT, max_tokens=2, adapters=adapters
        )
    )


@pytest.mark.parametrize("first", [NONE, A])
def test_a_warm_slot_is_continued_with_its_own_adapters_alone(
    first: tuple[AdapterUse, ...],
) -> None:
    book = ring_scheduler()
    for number, (adapters, n_kept) in enumerate(
        [(first, 0), (B, 0), (HALF_A, 0), (first, 699), (B, 699)]
    ):
        submit(book, number, adapters)
        then = run(book)
        [opened] = operations(then, OpenSequence)
        assert (opened.adapters, opened.n_kept) == (adapters, n_kept)
        [closed] = operations(then, CloseSequence)
        assert closed.stored == block_keys(b"ring", PROMPT, 512, adapters)
    keys = {block_keys(b"ring", PROMPT, 512, adapters) for adapters in (NONE, A, B, HALF_A)}
    assert len(keys) == 4


def test_only_a_prompt_of_the_same_adapter_waits_for_a_prefix() -> None:
    book = ring_scheduler()
    for number, adapters in enumerate([A, NONE, B]):
        submit(book, number, adapters)
    opened = operations(book.next_instructions(), OpenSequence)
    assert [each.adapters for each in opened] == [A, NONE, B]


def test_a_sequence_that_is_replayed_has_its_adapters() -> None:
    book = ring_scheduler()
    submit(book, 1, A)
    assert operations(book.next_instructions(), OpenSequence)[0].adapters == A
    book.suspend()
    assert book.resume(replace(book.ring, epoch=Epoch(2), prefix_seed=b"other")) == []
    [opened] = operations(book.next_instructions(), OpenSequence)
    assert opened.adapters == A
