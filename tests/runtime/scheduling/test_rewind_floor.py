"""What the head knows of layers that forget or keep a state: which prefixes can be reused."""

from __future__ import annotations

from collections import Counter

from shardnet.errors import CapacityError
from shardnet.runtime.scheduling.kv_block_manager import KvBlockManager, Slot
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    OperateSlot,
    Outcome,
    SendStep,
    SequenceFailed,
    SequenceRequest,
)
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.slot_operations import KeepState, OpenSequence
from shardnet.types import PROMPT_TAIL_ROWS, REWIND_ROWS, Epoch, SequenceId, StateId, blocks_for

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


def slot_with_states(book: KvBlockManager, n_held: int, *positions: int) -> Slot:
    """A warm slot, states of which are kept after these positions."""
    slot = book.start_empty(blocks_for(n_held)).slot
    slot.tokens = list(range(n_held))
    slot.n_held = slot.n_written = slot.n_answered = n_held
    slot.n_chunked = n_held // 256 * 256
    for position in positions:
        assert book.keep_state(slot, position) is not None
    book.keep_warm(slot, n_held)
    return slot


def positions_of(slot: Slot) -> list[int]:
    return [kept.position for kept in slot.states]


def test_a_slot_with_states_is_continued_from_where_one_is_kept() -> None:
    book = KvBlockManager(room_blocks=64, room_states=24)
    slot = slot_with_states(book, 700, 256, 512, 680, 700)
    assert book.keep_state(slot, 512) is None  # it is kept already
    for n_common, n_kept in ((255, 0), (256, 256), (679, 512), (690, 680), (701, 700)):
        assert kept(book, n_common) == n_kept
    assert kept(book, 701, chunk_rows=256) == 512
    assert kept(book, 511, chunk_rows=128) == 256
    start = book.start([*range(700), 7], 4)
    assert (start.slot, start.n_kept, start.source, start.state) == (slot, 700, None, 3)


def test_slots_that_begin_alike_refer_to_the_same_states() -> None:
    book = KvBlockManager(room_blocks=64, room_states=24)
    source = slot_with_states(book, 700, 256, 512, 700)
    start = book.start([*range(600), -1], 4)
    assert (start.source, start.n_kept, start.state) == (source.slot, 512, 1)
    assert positions_of(start.slot) == [256, 512]
    assert book.kept_states == 3
    book.drop(source)
    assert book.take_dropped() == (2,)
    book.drop(start.slot)
    assert sorted(book.take_dropped()) == [0, 1]
    assert book.kept_states == 0


def test_a_slot_that_is_rewound_forgets_the_states_behind() -> None:
    """There is no room for a copy beside it."""
    book = KvBlockManager(room_blocks=3, room_states=24)
    slot = slot_with_states(book, 700, 256, 512, 700)
    start = book.start([*range(600), -1], 3)
    assert (start.slot, start.n_kept, start.state) == (slot, 512, 1)
    assert positions_of(slot) == [256, 512]
    assert book.take_dropped() == (2,)


def test_what_is_cheap_to_compute_again_is_dropped_first() -> None:
    """Every second one of equal distances; what many refer to and what was used last stays."""
    book = KvBlockManager(room_blocks=64, room_states=14)
    slot = book.start_empty(8).slot
    for position in range(256, 256 * 13, 256):
        assert book.keep_state(slot, position) is not None
    assert book.kept_states == 12  # beside two of the slot, which runs
    assert book.keep_state(slot, 256 * 13) == 12
    assert book.keep_state(slot, 256 * 13 + 20) == 13
    assert positions_of(slot) == [512, 1024, *range(1280, 256 * 13 + 1, 256), 256 * 13 + 20]
    assert book.take_dropped() == (0, 2)
    assert book.keep_state(slot, 256 * 13 + 40) == 14  # that 20 behind another one goes
    assert book.take_dropped() == (13,)


def test_what_is_followed_of_who_runs_is_dropped_last_where_it_leaves_room() -> None:
    """Others stay where more is followed than half of the room, or nobody asks any more."""
    for n_followed, dropped in ((1, 1), (6, 6), (7, 0)):
        book = KvBlockManager(room_blocks=64, room_states=14)
        slot = book.start_empty(8).slot
        for position in range(256, 256 * 13, 256):
            assert book.keep_state(slot, position) is not None
        book.followed = frozenset(map(StateId, range(n_followed)))
        assert book.keep_state(slot, 256 * 13) == 12
        assert book.take_dropped() == (dropped,)
    book.followed = frozenset([StateId(2)])
    slot.n_held = slot.n_written = slot.n_answered = 256 * 13
    book.keep_warm(slot, 256 * 13)
    other = book.start_empty(1).slot
    assert book.keep_state(other, 256) == 13
    assert book.take_dropped() == (2,)  # who was followed with it has ended


def test_a_slot_is_followed_to_where_all_stages_can_go_on() -> None:
    """Behind a state there is a row that was answered, as all stages have kept it then."""
    rows, windows = KvBlockManager(room_blocks=64), KvBlockManager(room_blocks=64, window=WINDOW)
    states = KvBlockManager(room_blocks=64, room_states=24)
    kept_windows = KvBlockManager(room_blocks=64, window=WINDOW, kept_window=WINDOW)
    for book, has_state in ((rows, None), (windows, None), (states, True), (kept_windows, False)):
        slot = book.start_empty(8).slot
        slot.n_held = slot.n_written = 1000
        for position in (512, 768) if has_state is not None else ():
            assert book.keep_state(slot, position) is not None
        followed = [
            None if kept is None else kept.position
            for is_prefilling in (True, False)
            for n_answered in (512, 700, 769, 990)
            for kept in [book.to_follow(slot, n_answered, is_prefilling=is_prefilling)]
        ]
        prefilling, decoding = [None, 512, 768, 768], [None, 512, None, None]
        expected = {None: [None] * 8, True: [*prefilling, *prefilling]}
        assert followed == expected.get(has_state, [*prefilling, *decoding])


def test_states_of_a_prompt_that_many_share_outlive_those_of_one() -> None:
    book = KvBlockManager(room_blocks=64, room_states=10)
    shared = slot_with_states(book, 512, 512)
    for turn in range(12):
        start = book.start([*range(512), *range(-turn - 9, -turn)], 3)
        assert (start.n_kept, start.state) == (512, 0)
        slot = start.slot
        slot.tokens = [*range(512), *[-turn - 1] * 500]
        slot.n_held = slot.n_written = slot.n_answered = 1012
        assert book.keep_state(slot, 1012) is not None
        book.keep_warm(slot, 1012)
        assert book.kept_states <= 10
    assert positions_of(shared) == [512]
    assert Counter(state.position for state in book._kept) == {1012: 7, 512: 1}
    assert book.warm()[0].states == () or positions_of(book.warm()[0])


def test_running_sequences_take_the_room_of_states_that_are_kept() -> None:
    book = KvBlockManager(room_blocks=64, room_states=6)
    slot = slot_with_states(book, 1024, 256, 512, 768, 1024)
    assert book.kept_states == 4
    running = [book.start_empty(1).slot for _ in range(3)]
    assert book.kept_states == 0
    assert book.keep_state(running[0], 256) is None
    assert book.warm()[0] is slot  # nobody can go on from it: the first to be freed
    assert kept(book, 1024) == 0


def test_one_sequence_runs_whatever_room_for_states_a_ring_says_it_has() -> None:
    for room_states, n_slots in ((0, 1), (9, 1), (24, 8), (400, 16)):
        ring = RingLimits(
            epoch=Epoch(1),
            n_stages=1,
            room_blocks=16,
            context=2048,
            max_slots=16,
            room_states=room_states,
        )
        assert Scheduler(ring).queue.max_slots == n_slots


def test_the_last_rows_of_a_prompt_begin_at_a_state_that_is_kept() -> None:
    """As do those behind its first message and its last ones."""
    stop = 9
    prompt = [1] * 99 + [stop] + [2] * 299 + [stop] + [3] * 199 + [stop] + [4] * 100 + [stop, 5, 6]
    one = Scheduler(
        RingLimits(
            epoch=Epoch(1), n_stages=1, room_blocks=16, context=2048, max_slots=4, room_states=24
        )
    )
    one.submit(
        SequenceRequest(
            sequence_id=SequenceId(1),
            prompt=tuple(prompt),
            max_tokens=1,
            stop_ids=frozenset({stop}),
        )
    )
    sent: list[int] = []
    kept_at: list[int] = []
    while not sent or sent[-1] < len(prompt):
        steps = []
        for instruction in one.next_instructions():
            match instruction:
                case OperateSlot(operation=KeepState(n_positions=position)):
                    kept_at.append(position)
                case SendStep(batch=batch):
                    sent.append(batch.groups[0].position + batch.groups[0].n_rows)
                    steps.append(batch)
        for batch in steps:
            one.on_tokens(batch.step, [7] * batch.groups[0].n_sampled)
    last = len(prompt) - PROMPT_TAIL_ROWS
    assert sent == [100, 256, 512, 600, last, len(prompt)]
    assert kept_at[:5] == [100, 256, 512, 600, last]


def test_a_state_is_worth_nothing_where_a_window_has_dropped_the_rows_before_it() -> None:
    """As in a model with layers of both kinds."""
    book = KvBlockManager(room_blocks=64, window=WINDOW, room_states=24)
    slot_with_states(book, 1000, 512, 980, 1000)
    assert [kept(book, n_common) for n_common in (700, 979, 990, 1001)] == [0, 0, 980, 1000]


def test_rows_that_were_not_answered_are_kept_by_no_slot() -> None:
    for limits, n_kept in (({}, 900), ({"window": WINDOW}, 900), ({"room_states": 24}, 256)):
        book = KvBlockManager(room_blocks=64, **limits)
        slot = book.start_empty(8).slot
        slot.n_held = slot.n_written = 1000
        for position in (256, 980):
            book.keep_state(slot, position)
        slot.n_answered = 900
        assert book.worth_keeping(slot) == n_kept
        slot.n_answered = 1000
        assert book.worth_keeping(slot) == 1000
        slot.n_answered = 700
        if "window" in limits:
            assert book.worth_keeping(slot) == 0


def test_a_prompt_whose_state_a_stage_has_lost_is_computed_from_its_start() -> None:
    """A stage without memory to keep a state says so when a sequence should begin with it."""
    one = Scheduler(
        RingLimits(
            epoch=Epoch(1), n_stages=1, room_blocks=32, context=2048, max_slots=4, room_states=24
        )
    )
    opened: list[int] = []
    ended: list[Outcome] = []

    def run(number: int, *, lacks_states: bool) -> None:
        prompt = (*range(600), number)
        asked = SequenceRequest(sequence_id=SequenceId(number), prompt=prompt, max_tokens=2)
        one.submit(asked)
        starts: dict[SequenceId, int] = {}
        while one.n_active:
            steps = []
            for instruction in one.next_instructions():
                match instruction:
                    case OperateSlot(operation=OpenSequence(sequence_id=each, n_kept=n_kept)):
                        starts[each] = n_kept
                        opened.append(n_kept)
                    case SendStep(batch=batch):
                        steps.append(batch)
            for batch in steps:
                if lacks_states and starts[batch.groups[0].sequence_id]:
                    ended.extend(one.on_step_failed(batch.step, CapacityError("not here any more")))
                else:
                    sampled = sum(group.n_sampled for group in batch.groups)
                    ended.extend(one.on_tokens(batch.step, [7] * sampled))

    run(1, lacks_states=False)
    run(2, lacks_states=True)
    run(3, lacks_states=False)
    assert not any(isinstance(outcome, SequenceFailed) for outcome in ended)
    tail = 601 - PROMPT_TAIL_ROWS
    assert opened == [0, tail, 0, tail]
