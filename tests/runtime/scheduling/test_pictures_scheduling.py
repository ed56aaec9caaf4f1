"""Pictures among token ids: no two share a prefix, none is cut whose rows see each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.rings.answered_steps import operations, ring_scheduler, run

from shardnet.runtime.scheduling.kv_block_manager import block_keys
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import EncodePictures, SendStep, SequenceRequest
from shardnet.slot_operations import CloseSequence, OpenSequence, PicturePlace, Pictures
from shardnet.types import SequenceId

PROMPT = tuple(range(900))


def place(position: int, n_positions: int, name: str, *, sees: bool = False) -> PicturePlace:
    return PicturePlace(
        position=position,
        n_positions=n_positions,
        grid=(1, 1, n_positions),
        see_each_other=sees,
        digest=name.encode() * 16,
    )


A, B, LATER = place(100, 300, "a"), place(100, 300, "b"), place(600, 20, "c")


def submit(
    book: Scheduler, number: int, pictures: Pictures, prompt: Sequence[int] = PROMPT
) -> None:
    book.submit(
        SequenceRequest(
            sequence_id=SequenceId(number), prompt=tuple(prompt), max_tokens=2, pictures=pictures
        )
    )


def test_a_prefix_ends_before_the_first_picture_that_differs() -> None:
    book = ring_scheduler()
    for number, (pictures, n_kept, encoded) in enumerate(
        [
            ((A, LATER), 0, [A, LATER]),
            ((B, LATER), 100, [B, LATER]),
            ((A,), 600, []),  # the third picture's tokens are others there
            ((A, LATER), 899, []),
        ]
    ):
        submit(book, number, pictures)
        then = run(book)
        [opened] = operations(then, OpenSequence)
        assert (opened.pictures, opened.n_kept) == (pictures, n_kept)
        asked = [list(each.places) for each in then if isinstance(each, EncodePictures)]
        assert asked == ([encoded] if encoded else [])
        [closed] = operations(then, CloseSequence)
        assert closed.stored == block_keys(b"ring", PROMPT, 768, (), pictures)
    one, two, none = (block_keys(b"ring", PROMPT, 768, (), each) for each in ((A,), (B,), ()))
    assert len({one[0], two[0], none[0]}) == 3


@pytest.mark.parametrize(("first", "n_rows"), [(0, 256), (100, 256), (200, 256), (250, 400)])
def test_a_chunk_cuts_no_picture_whose_rows_see_each_other(first: int, n_rows: int) -> None:
    book = ring_scheduler()
    picture = place(first, n_rows, "a", sees=True)
    submit(book, 1, (picture,))
    ends = [
        step.batch.groups[0].position + step.batch.groups[0].n_rows
        for step in run(book)
        if isinstance(step, SendStep)
    ]
    assert not [end for end in ends if picture.position < end < picture.end]
    assert 900 in ends
    submit(book, 2, (picture,), PROMPT[: picture.end - 5])  # it ends within the picture
    [opened] = operations(run(book), OpenSequence)
    assert opened.n_kept == (picture.position if picture.position >= 16 else 0)


@pytest.mark.parametrize(
    ("picture", "other"), [(A, range(5000, 5040)), (LATER, PROMPT[:200])], ids=["unlike", "alike"]
)
def test_rows_wait_for_their_pictures_and_others_do_not(
    picture: PicturePlace, other: Sequence[int]
) -> None:
    book = ring_scheduler()
    submit(book, 1, (picture,))
    submit(book, 2, (), other)
    [step] = [each for each in book.next_instructions() if isinstance(each, SendStep)]
    assert {group.sequence_id for group in step.batch.groups} == {2}
    book.queue.encoded(SequenceId(1))
    then: list[SendStep] = []
    for _ in range(2):  # the first step with a text's row goes without rows of prompts
        book.on_tokens(step.batch.step, [7])
        then = [each for each in book.next_instructions() if isinstance(each, SendStep)]
        step = then[0]
    assert 1 in {group.sequence_id for step in then for group in step.batch.groups}
