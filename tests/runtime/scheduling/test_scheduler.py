"""The scheduler, as a pure machine: any order of events keeps its promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings.toy_ring import STOP_ID, Oracle, ToyRing, next_token, text_of

from shardnet.errors import (
    BusyError,
    CapacityError,
    LocalProtocolError,
    ShardnetError,
    UsageError,
    WrongValuesError,
)
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    FinishReason,
    OperateSlot,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    TokenSampled,
)
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits, TripCost
from shardnet.slot_operations import CloseSequence, FreeSlot, OpenSequence
from shardnet.types import BLOCK_POSITIONS, Epoch, SequenceId, StepId

CONTEXT = 1024
LIMITS = StepLimits(chunk_rows=64, mixed_rows=32, cheap_rows=8, exact_rows=4)


def ring(
    n_stages: int = 2,
    room_blocks: int = 8,
    max_slots: int = 16,
    max_waiting: int = 100,
    context: int = CONTEXT,
    limits: StepLimits = LIMITS,
    *,
    shares_blocks: bool = False,
) -> ToyRing:
    return ToyRing(
        Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=n_stages,
                room_blocks=room_blocks,
                context=context,
                max_slots=max_slots,
                max_waiting=max_waiting,
                limits=limits,
                shares_blocks=shares_blocks,
            )
        )
    )


def prompt(seed: int, n_tokens: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i * seed) % 251 for i in range(n_tokens))


def request(
    number: int,
    tokens: tuple[int, ...] | int = 5,
    max_tokens: int = 3,
    *,
    stop: bool = False,
    priority: int = 0,
    deterministic: bool = False,
    whole_prompt: bool = False,
    drafter: Oracle | None = None,
) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=SequenceId(number),
        prompt=prompt(number, tokens) if isinstance(tokens, int) else tokens,
        max_tokens=max_tokens,
        stop_ids=frozenset({STOP_ID}) if stop else frozenset(),
        priority=priority,
        deterministic=deterministic,
        whole_prompt=whole_prompt,
        drafter=drafter,
    )


def test_prompt_chunks_end_at_multiples_of_the_chunk_size_and_flow_behind_each_other() -> None:
    for n_stages in (1, 2, 4):
        one = ring(n_stages=n_stages)
        one.scheduler.submit(request(1, 2 * 64 + 1))
        one.pump()
        expected = [(0, 64, 0), (64, 64, 0), (128, 1, 1)]
        groups = [(g.position, g.n_rows, g.n_sampled) for g in one.groups()]
        assert groups == expected[: one.scheduler.max_in_flight]


def test_short_prompts_share_a_step() -> None:
    one = ring()
    for number in range(1, 5):
        one.scheduler.submit(request(number, 20))
    assert [step.batch.n_rows for step in one.pump()] == [60, 20]


def test_a_text_is_what_it_is_alone_until_the_stop_id() -> None:
    for number in range(1, 30):
        one = ring()
        one.scheduler.submit(request(number, 7, max_tokens=40, stop=True))
        one.run()
        said = one.said[SequenceId(number)]
        assert said == text_of(prompt(number, 7), 40, CONTEXT, stop=True)
        assert said[-1] == STOP_ID or len(said) == 40


def test_how_a_sequence_ends() -> None:
    one = ring()
    one.scheduler.submit(request(1, 5, max_tokens=1))
    one.pump()
    token = next_token(prompt(1, 5))
    assert one.answer() == [
        TokenSampled(sequence_id=SequenceId(1), token_id=token, row=0),
        SequenceFinished(sequence_id=SequenceId(1), reason=FinishReason.LENGTH),
    ]
    [close] = one.scheduler.next_instructions()
    assert isinstance(close, OperateSlot)
    slot = close.operation.slot
    assert close == OperateSlot(operation=CloseSequence(sequence_id=SequenceId(1), slot=slot))
    assert one.scheduler.queue.kv_blocks.booked_blocks == 0


def test_the_end_of_the_context_ends_with_length() -> None:
    one = ring()
    one.scheduler.submit(request(1, CONTEXT - 3, max_tokens=100))
    one.run()
    assert len(one.said[SequenceId(1)]) == 3


@pytest.mark.parametrize("n_prompt", [100, CONTEXT])
def test_no_tokens_asked_for_computes_the_prompt_and_samples_nothing(n_prompt: int) -> None:
    one = ring()
    one.scheduler.submit(request(1, n_prompt, max_tokens=0))
    one.run()
    assert one.finished == {SequenceId(1)}
    assert sum(group.n_rows for group in one.groups()) == n_prompt
    assert not any(group.n_sampled for group in one.groups())


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (request(1, ()), UsageError, "prompt is empty"),
        (request(1, 1, max_tokens=-1), UsageError, "max-tokens"),
        (request(1, CONTEXT), CapacityError, "1024 tokens and the context holds 1024"),
        (request(1, 300, max_tokens=900), CapacityError, "room for 3"),
    ],
)
def test_what_can_never_run_is_refused(
    bad: SequenceRequest, error: type[ShardnetError], message: str
) -> None:
    one = ring(room_blocks=3)
    with pytest.raises(error, match=message):
        one.scheduler.submit(bad)
    assert one.scheduler.n_active == 0


def test_the_queue_has_an_end() -> None:
    one = ring(max_waiting=2)
    one.scheduler.submit(request(1))
    one.scheduler.submit(request(2))
    with pytest.raises(BusyError, match="2 requests are waiting already"):
        one.scheduler.submit(request(3))


def test_a_failed_step_fails_its_sequences_alone() -> None:
    one = ring()
    one.scheduler.submit(request(1, 64))
    one.scheduler.submit(request(2, 64))
    one.pump()
    cause = CapacityError("no room")
    first = one.in_flight.popleft()[0]
    assert one.scheduler.on_step_failed(first.step, cause) == [
        SequenceFailed(sequence_id=SequenceId(1), error=cause)
    ]
    one.run()
    assert one.said == {SequenceId(2): text_of(prompt(2, 64), 3, CONTEXT)}


@pytest.mark.parametrize("shares_blocks", [False, True])
def test_what_begins_with_rows_in_flight_starts_anew_if_they_fail(shares_blocks: bool) -> None:
    """Of three prompts the second is started with the first one's rows, the third with its own."""
    one = ring(n_stages=4, room_blocks=12, shares_blocks=shares_blocks)
    one.failing = {StepId(6): CapacityError("no room")}
    system = prompt(7, 330)
    for number in (1, 2, 3):
        one.scheduler.submit(request(number, (*system, *[number // 2] * 40, number), max_tokens=9))
        one.pump()
    one.run()
    kept = [opened.n_kept for opened in one.operations(OpenSequence)]
    assert kept == [0, 330, 362, 0, 370]
    assert one.finished == {2, 3}
    for number in (2, 3):
        alone = text_of((*system, *[number // 2] * 40, number), 9, CONTEXT)
        assert one.said[SequenceId(number)] == alone


def test_rows_that_fail_after_their_client_has_left_are_not_kept() -> None:
    one = ring()
    one.failing = {StepId(2): CapacityError("no room")}
    long = prompt(7, 300)
    one.scheduler.submit(request(1, long, max_tokens=9))
    one.pump()
    one.answer()
    one.scheduler.end(SequenceId(1))
    one.pump()
    one.answer()
    one.scheduler.submit(request(2, (*long, 1), max_tokens=9))
    one.run()
    assert [opened.n_kept for opened in one.operations(OpenSequence)] == [0, 64]
    assert one.said[SequenceId(2)] == text_of((*long, 1), 9, CONTEXT)


def test_an_answer_to_no_step_is_our_own_bug() -> None:
    one = ring()
    one.scheduler.submit(request(1, 2))
    [step] = one.pump()
    with pytest.raises(LocalProtocolError):
        one.scheduler.on_tokens(StepId(step.batch.step + 1), [1])
    with pytest.raises(LocalProtocolError):
        one.scheduler.on_tokens(step.batch.step, [1, 2])


# --- many at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_decoding_sequences_share_as_many_steps_as_there_are_stages(n_stages: int) -> None:
    one = ring(n_stages=n_stages, room_blocks=40)
    for number in range(1, 13):
        one.scheduler.submit(request(number, 5, max_tokens=200))
    one.pump()
    for _ in range(60):
        one.answer()
        one.pump()
    steady = [len(batch.groups) for batch, _ in one.in_flight]
    assert steady == [12 // n_stages] * n_stages


def test_a_long_prompt_travels_beside_the_rows_of_those_who_decode() -> None:
    one = ring()
    for number in range(1, 5):
        one.scheduler.submit(request(number, 5, max_tokens=200))
    one.pump()
    for _ in range(10):
        one.answer()
        one.pump()
    one.scheduler.submit(request(9, 400, max_tokens=1))
    before = len(one.sent)
    while SequenceId(9) not in one.finished:
        one.answer()
        one.pump()
    carrying = [s for s in one.sent[before:] if any(g.sequence_id == 9 for g in s.batch.groups)]
    rows = [g.n_rows for s in carrying for g in s.batch.groups if g.sequence_id == 9]
    assert max(rows) == LIMITS.mixed_rows
    assert sum(rows) == 400
    assert all(len(step.batch.groups) == 3 for step in carrying[1:-1])  # two decode rows beside it
    decoded = [s for s in one.sent[before:] if any(g.sequence_id < 9 for g in s.batch.groups)]
    assert len(decoded) >= len(one.sent) - before - 1  # hardly a step without them


@pytest.mark.parametrize(
    ("row_s", "expected"), [(0.0, 32), (0.001, 32), (0.003, 18), (0.004, 14), (0.04, 3), (1.0, 2)]
)
@pytest.mark.parametrize("waits", [1.0, 1.5])
def test_as_many_prompt_rows_travel_beside_others_as_whole_trips_allow(
    row_s: float, expected: int, waits: float
) -> None:
    """A step of two decode rows takes 50 ms and may take 100, with all that it `waits` for."""
    scheduler, trips = ring().scheduler, TripCost()
    scheduler.mixed_rows = 8
    trips.alone.learn(2, 0.05 + 2 * row_s, 0.02)
    seen = []
    for _ in range(40):
        n_prompt = scheduler.mixed_rows
        trip_s = (0.05 + row_s * (2 + n_prompt)) * waits
        scheduler.mix(2, n_prompt, trip_s, trips, 2.0)
        seen.append(scheduler.mixed_rows)
    assert seen[0] <= 16
    if waits == 1.0:
        assert seen[-1] == expected
    else:
        assert seen[-1] <= expected
        assert seen[-1] == 1 or trip_s <= 2.1 * (0.05 + 2 * row_s)


def test_a_prompts_last_rows_and_what_was_never_alone_teach_nothing() -> None:
    scheduler, trips = ring().scheduler, TripCost()
    scheduler.mixed_rows = 8
    scheduler.mix(2, 8, 5.0, trips, 2.0)
    trips.alone.learn(2, 0.05)
    scheduler.mix(2, 3, 0.2, trips, 2.0)
    assert scheduler.mixed_rows == 8


def test_now_and_then_a_step_goes_without_the_rows_of_a_prompt() -> None:
    """So it is known how long it takes alone; the first one does."""
    one = ring(n_stages=1, room_blocks=2000, context=100_000)
    one.scheduler.submit(request(1, 5, max_tokens=400))
    one.scheduler.submit(request(2, 20_000, max_tokens=1, priority=-1))
    one.pump()
    while len(one.said.get(SequenceId(1), ())) < 300:
        one.answer()
        one.pump()
    decoded = [step.batch for step in one.sent if step.is_decode]
    alone = [place for place, batch in enumerate(decoded) if len(batch.groups) == 1]
    assert alone == [0, 128, 256]


def test_a_larger_priority_goes_first_and_equals_by_arrival() -> None:
    one = ring(max_slots=1)
    for number, priority in ((1, 0), (2, 0), (3, 5)):
        one.scheduler.submit(request(number, priority=priority))
    one.run()
    assert list(one.said) == [3, 1, 2]


def test_the_youngest_is_paused_when_the_room_runs_out_and_goes_on_later() -> None:
    one = ring(room_blocks=4)
    for number in (1, 2, 3):
        one.scheduler.submit(request(number, 10, max_tokens=600))
    one.run()
    assert one.paused[SequenceId(2)]
    assert not one.paused[SequenceId(1)]
    for number in (1, 2, 3):
        assert one.said[SequenceId(number)] == text_of(prompt(number, 10), 600, CONTEXT)
    assert one.finished == {1, 2, 3}
    resumed = [i for i in one.instructions if isinstance(i, OperateSlot) and i.is_resumed]
    assert len(resumed) == one.paused.total()


# --- drafts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("errs", [0, 1, 2, 5])
def test_drafts_change_no_token_and_right_ones_save_steps(errs: int) -> None:
    plain, drafted = ring(), ring()
    oracle = Oracle(errs=errs)
    plain.scheduler.submit(request(1, 20, max_tokens=60))
    drafted.scheduler.submit(request(1, 20, max_tokens=60, drafter=oracle))
    plain.run()
    drafted.run()
    assert drafted.said == plain.said
    if errs == 0:
        assert len(drafted.sent) < len(plain.sent) / 4
        assert all(proposed == accepted for proposed, accepted in oracle.learned)
    if errs == 1:
        assert not any(accepted for _, accepted in oracle.learned)
    assert max(group.n_rows for group in drafted.groups()[1:]) == LIMITS.cheap_rows


def test_drafts_share_what_a_step_carries_cheaply() -> None:
    one = ring(n_stages=1)
    for number in (1, 2, 3):
        one.scheduler.submit(request(number, 5, max_tokens=60, drafter=Oracle()))
    one.run()
    rows = [step.batch.n_rows for step in one.sent[1:]]
    assert max(rows) == LIMITS.cheap_rows
    assert one.finished == {1, 2, 3}


# --- prefixes -----------------------------------------------------------------------------------


def test_a_second_turn_continues_the_warm_slot() -> None:
    one = ring()
    first = prompt(1, 100)
    one.scheduler.submit(request(1, first, max_tokens=20))
    one.run()
    answer = one.said[SequenceId(1)]
    before = len(one.groups())
    second = (*first, *answer, 1, 2, 3)
    one.scheduler.submit(request(2, second, max_tokens=5))
    one.run()
    opened = one.operations(OpenSequence)
    assert opened[1].slot == opened[0].slot
    assert opened[1].n_kept == 119  # the last token of the answer was never computed
    assert one.groups()[before].n_rows == 4
    assert one.said[SequenceId(2)] == text_of(second, 5, CONTEXT)


def test_a_common_beginning_is_copied_and_both_go_on() -> None:
    one = ring()
    system = prompt(7, 90)
    one.scheduler.submit(request(1, (*system, 1, 2), max_tokens=10))
    one.run()
    one.scheduler.submit(request(2, (*system, 3, 4), max_tokens=10))
    one.run()
    one.scheduler.submit(request(3, (*system, 1, 2), max_tokens=10))
    one.run()
    opened = one.operations(OpenSequence)
    assert [o.n_kept for o in opened] == [0, 90, 91]
    assert opened[1].source == opened[0].slot != opened[1].slot
    assert one.said[SequenceId(3)] == one.said[SequenceId(1)]
    assert one.said[SequenceId(2)] == text_of((*system, 3, 4), 10, CONTEXT)


def test_requests_that_come_together_compute_their_common_beginning_once() -> None:
    one = ring()
    system = prompt(7, 200)
    for number in range(1, 6):
        one.scheduler.submit(request(number, (*system, number, 1), max_tokens=4))
    one.run()
    prefilled = sum(group.n_rows for group in one.groups() if group.position < 200)
    assert prefilled < 200 + 5 * LIMITS.mixed_rows
    for number in range(1, 6):
        assert one.said[SequenceId(number)] == text_of((*system, number, 1), 4, CONTEXT)


@pytest.mark.parametrize("together", [True, False])
def test_sixteen_requests_compute_and_hold_a_common_beginning_once(together: bool) -> None:
    """2,000 tokens are 7 whole blocks, and each request has one more: the room is no larger."""
    one = ring(room_blocks=7 + 16, context=4096, shares_blocks=True)
    system, numbers = prompt(7, 2000), range(1, 17)
    for number in numbers:
        one.scheduler.submit(request(number, (*system, number, 1), max_tokens=40))
        if not together:
            one.pump()
    one.pump()
    while one.in_flight and len(one.said) < 16:
        one.answer()
        one.pump()
    assert len(one.scheduler.computed()) == 16
    assert one.stage.n_blocks == one.scheduler.queue.kv_blocks.booked_blocks == 7 + 16
    one.run()
    n_rows = sum(group.n_rows for group in one.groups())
    assert n_rows <= 2000 + 16 * (2 + 39) + 15 * LIMITS.mixed_rows
    assert not one.paused
    for number in numbers:
        assert one.said[SequenceId(number)] == text_of((*system, number, 1), 40, 4096)


def test_a_slot_that_is_rewound_into_a_shared_block_is_booked_one_of_its_own() -> None:
    """The third request takes the first one's slot, whose second block the second one keeps."""
    one = ring(room_blocks=5, shares_blocks=True)
    system = prompt(7, 600)
    asked = {1: ((*system, 1), 300), 2: ((*system, 2), 140), 3: ((*system[:300], 3), 10)}
    for number in asked:
        one.scheduler.submit(request(number, *asked[number]))
        one.pump()
        while number != 2 and one.in_flight:
            one.answer()
            one.pump()
    opened = one.operations(OpenSequence)
    assert [o.n_kept for o in opened] == [0, 600, 300]
    assert (opened[2].slot, opened[2].source) == (opened[0].slot, None)
    for number, (tokens, max_tokens) in asked.items():
        assert one.said[SequenceId(number)] == text_of(tokens, max_tokens, CONTEXT)


def test_a_request_for_every_row_of_the_prompt_shares_nothing() -> None:
    one = ring()
    for number in (1, 2):
        one.scheduler.submit(request(number, prompt(1, 80), max_tokens=2, whole_prompt=True))
        one.run()
    assert [o.n_kept for o in one.operations(OpenSequence)] == [0, 0]


def test_warm_slots_are_given_up_when_room_is_short_the_shared_ones_last() -> None:
    one = ring(room_blocks=4)
    shared = prompt(1, 100)
    one.scheduler.submit(request(1, (*shared, 1), max_tokens=3))
    one.run()
    one.scheduler.submit(request(2, (*shared, 2), max_tokens=3))  # copies from 1
    one.run()
    one.scheduler.submit(request(3, 100, max_tokens=3))
    one.run()
    slots = {o.sequence_id: o.slot for o in one.operations(OpenSequence)}
    one.scheduler.submit(request(4, 600, max_tokens=3))
    one.run()
    freed = [o.slot for o in one.operations(FreeSlot)]
    assert freed == [slots[SequenceId(2)], slots[SequenceId(3)]]
    assert one.finished == {1, 2, 3, 4}


@pytest.mark.parametrize(("room_blocks", "most"), [(30, 16), (60, 30)])
def test_warm_slots_keep_within_their_share_of_a_large_room(room_blocks: int, most: int) -> None:
    """Four contexts of 4 blocks, or half of the room; the newest slots are those that stay."""
    one = ring(room_blocks=room_blocks)
    for number in range(1, 41):
        one.scheduler.submit(request(number, prompt(number, 200), max_tokens=3))
        one.run()
        assert one.scheduler.queue.kv_blocks.warm_blocks == min(number, most)
    freed = {o.slot for o in one.operations(FreeSlot)}
    warm = {slot.slot for slot in one.scheduler.queue.kv_blocks.warm()}
    assert warm <= freed | set(range(most + 1))
    one.scheduler.submit(request(41, (*prompt(40, 200), 1), max_tokens=3))
    one.run()
    assert one.operations(OpenSequence)[-1].n_kept >= 200


# --- deterministic ------------------------------------------------------------------------------


def check_exact(one: ToyRing, n_prompts: dict[SequenceId, int]) -> None:
    """What design decision 4 asks of every step that carries rows of an exact sequence.

    `n_prompts` has the length of each such sequence's prompt.
    """
    for step in one.sent:
        groups = step.batch.groups
        if not any(group.sequence_id in n_prompts for group in groups):
            continue
        if step.batch.n_rows <= LIMITS.exact_rows and len(groups) > 1:
            continue
        [group] = groups
        n_prompt = n_prompts[group.sequence_id]
        if group.position < n_prompt:
            assert group.position % LIMITS.chunk_rows == 0
            assert group.n_rows == min(LIMITS.chunk_rows, n_prompt - group.position)
        else:
            assert group.n_rows <= LIMITS.exact_rows


def test_deterministic_sequences_travel_in_exact_steps() -> None:
    one = ring(room_blocks=4)
    for number in (1, 2, 3):
        one.scheduler.submit(
            request(number, 70, max_tokens=500, deterministic=True, drafter=Oracle(errs=3))
        )
    one.scheduler.submit(request(4, 70, max_tokens=100))
    one.run()
    assert one.paused.total()
    check_exact(one, dict.fromkeys(map(SequenceId, (1, 2, 3)), 70))
    assert one.finished == {1, 2, 3, 4}


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize(("decodes", "arrives"), [(False, True), (True, False), (True, True)])
def test_a_prompt_goes_on_by_itself_where_it_may_not_travel_beside_others(
    n_stages: int, decodes: bool, arrives: bool
) -> None:
    one = ring(n_stages=n_stages, room_blocks=40)
    for number in range(1, n_stages + 1):
        one.scheduler.submit(request(number, 20, max_tokens=200, deterministic=decodes))
    one.pump()
    for _ in range(8):
        one.answer()
        one.pump()
    before = len(one.sent)
    one.scheduler.submit(request(9, 150, max_tokens=2, deterministic=arrives))
    one.pump()
    while SequenceId(9) not in one.finished:
        one.answer()
        one.pump()
    meanwhile = [step.is_decode for step in one.sent[before:]]
    assert len(meanwhile) < 20
    assert meanwhile.count(True) >= len(meanwhile) // 2
    one.run()
    exact = {1: 20, 2: 20} if decodes else {}
    exact |= {9: 150} if arrives else {}
    check_exact(one, {SequenceId(number): n_prompt for number, n_prompt in exact.items()})
    assert one.said[SequenceId(9)] == text_of(prompt(9, 150), 2, CONTEXT)


def test_deterministic_sequences_reuse_whole_chunks_alone() -> None:
    one = ring()
    first = prompt(1, 150)
    one.scheduler.submit(request(1, first, max_tokens=30, deterministic=True))
    one.run()
    second = (*first, *one.said[SequenceId(1)], 5)
    one.scheduler.submit(request(2, second, max_tokens=3, deterministic=True))
    one.run()
    opened = one.operations(OpenSequence)
    assert [o.n_kept for o in opened] == [0, 128]


# --- any order ----------------------------------------------------------------------------------

requests = st.tuples(
    st.just("submit"),
    st.integers(0, 3),  # which beginning the prompt has
    st.integers(1, 300) | st.integers(500, 600),  # how much of it
    st.integers(0, 400),  # tokens to make
    st.sampled_from(["plain", "exact", "drafted", "flown", "urgent", "whole"]),
)
events = st.lists(
    st.one_of(
        requests,
        st.tuples(st.just("answer"), st.integers(1, 12)),
        st.tuples(st.just("fail"), st.integers(0, 3)),  # how many steps go before
        st.tuples(st.just("end"), st.integers(1, 12)),
    ),
    max_size=50,
)


DRAFTERS = {
    "drafted": lambda: Oracle(errs=3),
    "exact": lambda: Oracle(errs=3, most=2),
    "flown": lambda: Oracle(errs=7, most=2),
}


@settings(max_examples=200)
@given(
    events=events,
    n_stages=st.integers(1, 4),
    max_slots=st.integers(1, 6),
    room_blocks=st.integers(3, 6),
    shares_blocks=st.booleans(),
)
def test_every_request_ends_exactly_once_and_says_what_it_says_alone(
    events: list[tuple[str, int]],
    n_stages: int,
    max_slots: int,
    room_blocks: int,
    shares_blocks: bool,
) -> None:
    one = ring(n_stages, room_blocks, max_slots, shares_blocks=shares_blocks)
    asked: dict[SequenceId, SequenceRequest] = {}
    ended_from_outside = set()
    for kind, number, *rest in events:
        match kind:
            case "submit":
                n_prompt, max_tokens, how = rest
                asked_for = request(
                    len(asked) + 1,
                    prompt(number, n_prompt),
                    min(max_tokens, 3 * BLOCK_POSITIONS - n_prompt),
                    stop=True,
                    priority=int(how == "urgent"),
                    deterministic=how == "exact",
                    whole_prompt=how == "whole",
                    drafter=DRAFTERS[how]() if how in DRAFTERS else None,
                )
                asked[asked_for.sequence_id] = asked_for
                one.scheduler.submit(asked_for)
            case "answer":
                for _ in range(min(number, len(one.in_flight))):
                    one.answer()
            case "fail":
                one.failing[StepId(len(one.sent) + number + 1)] = CapacityError("x")
            case "end" if one.scheduler.end(SequenceId(number)):
                one.ended[SequenceId(number)] += 1
                ended_from_outside.add(number)
        one.pump()
    one.run()
    assert one.ended == dict.fromkeys(asked, 1)
    for sequence_id, asked_for in asked.items():
        alone = text_of(asked_for.prompt, asked_for.max_tokens, CONTEXT, stop=True)
        said = one.said.get(sequence_id, [])
        assert said == (alone if sequence_id in one.finished else alone[: len(said)])
    check_exact(one, {n: len(r.prompt) for n, r in asked.items() if r.deterministic})
    assert one.scheduler.n_active == 0
    assert one.scheduler.queue.kv_blocks.booked_blocks == one.scheduler.queue.kv_blocks.warm_blocks
    assert all(slot.owner is None for slot in one.stage.slots.values())


@pytest.mark.parametrize(
    ("n_stages", "n_others", "n_flying", "all_draft"),
    [(1, 0, 1, 1), (2, 0, 4, 1), (4, 0, 8, 1), (4, 1, 8, 1), (4, 1, 2, 0), (2, 1, 2, 1)],
)
def test_drafts_go_behind_drafts_where_stages_have_nothing_else_to_do(
    n_stages: int, n_others: int, n_flying: int, all_draft: int
) -> None:
    """One answer comes round in as many frames, but as many of them are in flight as can be.

    None beside a text that has not asked for drafts: it would wait for them.
    """
    one, drafter = ring(n_stages=n_stages), Oracle(errs=9, most=1)
    one.scheduler.submit(request(1, 5, max_tokens=200, drafter=drafter))
    for number in range(2, n_others + 2):
        other = Oracle(errs=9, most=1) if all_draft else None
        one.scheduler.submit(request(number, 5, max_tokens=200, drafter=other))
    n_rounds, most = 0, 0
    one.pump()
    while one.in_flight:
        n_rounds += 1
        flight = [batch for batch, _ in one.in_flight for _ in batch.groups]
        most = max(most, len(flight))
        for _ in range(len(one.in_flight)):
            one.answer()
        one.pump()
    for number in range(1, n_others + 2):
        assert one.said[SequenceId(number)] == text_of(prompt(number, 5), 200, CONTEXT)
    assert most == n_flying
    if not n_others:
        waits = 200 / (1 + 8 / 9)  # two rows a step, and one step in nine has a wrong draft
        assert n_rounds < 0.7 * waits if n_stages > 1 else n_rounds > 0.9 * waits


def test_a_frame_behind_a_wrong_draft_fails_nobody() -> None:
    failing: dict[StepId, ShardnetError] = {}
    for _ in range(2):
        one = ring()
        one.failing = failing
        one.scheduler.submit(request(1, 5, max_tokens=9, drafter=Oracle(errs=7, most=1)))
        one.pump()
        while one.scheduler.counting(step := one.in_flight[0][0].step):
            one.answer()
            one.pump()
        failing = {step: WrongValuesError("not finite")}
    one.run()
    assert one.said[SequenceId(1)] == text_of(prompt(1, 5), 9, CONTEXT)


def test_blocks_are_what_stages_count() -> None:
    one = ring()
    one.scheduler.submit(request(1, BLOCK_POSITIONS + 1, max_tokens=2))
    one.run()
    assert one.stage.n_blocks == one.scheduler.queue.kv_blocks.booked_blocks == 2


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 2])
def test_sequences_in_lockstep_decode_in_rounds(n_stages: int, at_once: int) -> None:
    """Prompts first; then one row of each in every round, whenever the answers came."""
    one = ring(n_stages=n_stages, room_blocks=40)
    lengths = {1: 9, 2: 3, 3: 12, 4: 12, 5: 1}
    for number, n_tokens in lengths.items():
        asked = request(number, 150 * number, max_tokens=n_tokens)
        one.scheduler.submit(replace(asked, lockstep=True))
    one.pump()
    while one.in_flight:
        for _ in range(min(at_once, len(one.in_flight))):
            one.answer()
        one.pump()
    for number, n_tokens in lengths.items():
        assert one.said[SequenceId(number)] == text_of(
            prompt(number, 150 * number), n_tokens, CONTEXT
        )
    kinds = [step.is_decode for step in one.sent]
    assert kinds == sorted(kinds)
    rows = [group.sequence_id for step in one.sent if step.is_decode for group in step.batch.groups]
    rounds = [[n for n, most in lengths.items() if most - 1 > made] for made in range(11)]
    assert rows == [number for numbers in rounds for number in numbers]
    most = max(len(step.batch.groups) for step in one.sent if step.is_decode)
    assert most == -(-len(rounds[0]) // n_stages)
