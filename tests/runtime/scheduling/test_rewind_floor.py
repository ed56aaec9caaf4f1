"""What the head knows of layers that forget or keep a state: which prefixes can be reused."""

from __future__ import annotations

from shardnet.runtime.scheduling.kv_block_manager import KvBlockManager, Slot
from shardnet.types import PROMPT_TAIL_ROWS, REWIND_ROWS

WINDOW = 100


def warm_slot(book: KvBlockManager, n_held: int, n_written: int) -> Slot:
    slot = book.start_empty(8).slot
    slot.tokens = list(range(n_held))
    slot.n_held, slot.n_written, slot.n_chunked = n_held, n_written, n_held // 256 * 256
    slot.n_answered = n_held
    book.keep_warm(slot, n_held)
    return slot


def kept(book: KvBlockManager, n_common: int, chunk_rows: int = 0) -> int:
    prompt = [*range(n_common), -1, -2]
    found = book.prefix(prompt, chunk_rows=chunk_rows)
    return found.n_kept if found else 0


def test_a_slot_is_rewound_by_the_rows_of_a_frame_and_no_more() -> None:
    book = KvBlockManager(room_blocks=64, window=WINDOW)
    slot = warm_slot(book, 1000, 1010)
    assert book.floor(slot) == 1010 - REWIND_ROWS
    assert kept(book, 1010 - REWIND_ROWS) == 1010 - REWIND_ROWS
    assert kept(book, 1010 - REWIND_ROWS - 1) == 0
    assert kept(book, 800, chunk_rows=256) == 768
    assert kept(book, 767, chunk_rows=256) == 0


def test_a_slot_that_has_forgotten_nothing_can_be_rewound_anywhere() -> None:
    book = KvBlockManager(room_blocks=64, window=WINDOW)
    warm_slot(book, WINDOW + REWIND_ROWS, WINDOW + REWIND_ROWS)
    assert kept(book, 20) == 20


def test_without_windows_there_is_no_floor() -> None:
    book = KvBlockManager(room_blocks=64)
    warm_slot(book, 1000, 1000)
    assert kept(book, 20) == 20


def test_a_beginning_of_few_rows_is_not_copied() -> None:
    book = KvBlockManager(room_blocks=64)
    warm_slot(book, 100, 100)
    starts = [book.start([*range(n_common), -1], 1) for n_common in (15, 16)]
    assert [start.n_kept for start in starts] == [0, 16]


def test_a_copy_has_forgotten_what_its_source_had() -> None:
    book = KvBlockManager(room_blocks=64, window=WINDOW)
    source = warm_slot(book, 1000, 1200)
    start = book.start([*range(950), -1], 4)
    assert (start.source, start.n_kept) == (source.slot, 950)
    assert book.floor(start.slot) == book.floor(source) == 1200 - REWIND_ROWS


def test_a_slot_with_a_state_is_continued_from_its_end_only() -> None:
    book = KvBlockManager(room_blocks=64, state_slots=4)
    warm_slot(book, 300, 300)
    assert [kept(book, n_common) for n_common in (20, 299, 300, 310)] == [0, 0, 300, 300]
    assert kept(book, 310, chunk_rows=256) == 0
    warm_slot(book, 512, 512)
    assert kept(book, 600, chunk_rows=256) == 512


def test_a_slot_with_a_state_is_continued_from_what_was_noted_on_the_way() -> None:
    book = KvBlockManager(room_blocks=64, state_slots=2)
    slot = warm_slot(book, 700, 700)
    steps = ((0, 256), (255, 9), (256, 1), (256, 9), (511, 99))
    for position, n_rows in steps:
        slot.note_state(position, n_rows)
        assert slot.noted == ((256,) if (position, n_rows) in steps[3:] else ())
    assert [kept(book, n_common) for n_common in (255, 256, 699, 701)] == [0, 256, 256, 700]
    assert [kept(book, 699, chunk_rows=rows) for rows in (128, 100)] == [256, 0]
    book.start_empty(1)
    start = book.start([*range(600), 7], 4)  # there is no slot for a copy
    assert (start.slot, start.n_kept, start.source) == (slot, 256, None)
    assert slot.noted == ()


def test_the_state_before_the_last_rows_of_a_prompt_is_noted_too() -> None:
    book = KvBlockManager(room_blocks=64, state_slots=2)
    slot = warm_slot(book, 700, 700)
    for position, n_rows in ((256, 256), (512, 168), (680, PROMPT_TAIL_ROWS)):
        slot.note_state(position, n_rows)
    assert slot.noted == (512, 680)
    assert [kept(book, n_common) for n_common in (511, 679, 690)] == [0, 512, 680]
    book.start_empty(1)
    assert book.start([*range(690), 7], 4).n_kept == 680
    assert slot.noted == (512,)


def test_rows_that_were_not_answered_are_kept_by_no_slot() -> None:
    for limits, n_kept in (({}, 900), ({"window": WINDOW}, 900), ({"state_slots": 2}, 256)):
        book = KvBlockManager(room_blocks=64, **limits)
        slot = book.start_empty(8).slot
        slot.n_held = slot.n_written = 1000
        slot.n_answered, slot.noted = 900, (256, 980)
        assert book.worth_keeping(slot) == n_kept
        slot.n_answered = 1000
        assert book.worth_keeping(slot) == 1000
        slot.n_answered = 700
        if "window" in limits:
            assert book.worth_keeping(slot) == 0


def test_slots_with_states_are_few_whatever_they_hold() -> None:
    """A warm slot is given up for each new one; a running one is copied at its end."""
    book = KvBlockManager(room_blocks=64, state_slots=2)
    first = warm_slot(book, 100, 100)
    running = book.start_empty(1).slot
    running.tokens, running.n_held, running.n_written = [*range(50)], 50, 50
    start = book.start([*range(60)], 1)
    assert (start.source, start.n_kept, start.given_up) == (running.slot, 50, (first,))
