"""The scheduler, as a pure machine: any order of events keeps its promises."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardnet.errors import CapacityError, LocalProtocolError, ShardnetError, UsageError
from shardnet.runtime.scheduler import (
    CloseSlot,
    FinishReason,
    OpenSlot,
    Scheduler,
    SendStep,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    TokenSampled,
)
from shardnet.types import Epoch, MicroBatch, SequenceId, StepId, blocks_for

CHUNK = 4
STOP_ID = 9


def scheduler(n_stages: int = 2, room_blocks: int = 8, max_slots: int = 3) -> Scheduler:
    return Scheduler(
        epoch=Epoch(1),
        n_stages=n_stages,
        room_blocks=room_blocks,
        context=1024,
        max_slots=max_slots,
        chunk_rows=CHUNK,
    )


def request(number: int, n_prompt: int, max_tokens: int = 3) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=SequenceId(number),
        prompt=tuple(range(100, 100 + n_prompt)),
        max_tokens=max_tokens,
        stop_ids=frozenset({STOP_ID}),
    )


def sent(instructions: list[object]) -> list[MicroBatch]:
    return [i.batch for i in instructions if isinstance(i, SendStep)]


def test_prompt_chunks_end_at_multiples_of_the_chunk_size_and_flow_behind_each_other() -> None:
    for n_stages in (1, 2, 4):
        one = scheduler(n_stages=n_stages)
        one.submit(request(1, n_prompt=2 * CHUNK + 1))
        batches = sent(one.next_instructions())
        expected = [(0, CHUNK, 0), (CHUNK, CHUNK, 0), (2 * CHUNK, 1, 1)]
        groups = [(g.position, g.n_rows, g.n_sampled) for b in batches for g in b.groups]
        assert groups == expected[: one.max_in_flight]


def test_tokens_come_back_until_the_stop_id() -> None:
    one = scheduler()
    one.submit(request(1, n_prompt=2, max_tokens=5))
    (step,) = sent(one.next_instructions())
    assert one.on_tokens(step.step, [7]) == [
        TokenSampled(sequence_id=SequenceId(1), token_id=7, row=0)
    ]
    (step,) = sent(one.next_instructions())
    assert list(step.token_ids) == [7]
    assert step.groups[0].position == 2
    assert one.on_tokens(step.step, [STOP_ID])[-1] == SequenceFinished(
        sequence_id=SequenceId(1), reason=FinishReason.STOP
    )
    assert isinstance(one.next_instructions()[0], CloseSlot)
    assert one.booked_blocks == 0


def test_the_end_of_the_context_ends_with_length() -> None:
    one = Scheduler(epoch=Epoch(1), n_stages=1, room_blocks=1, context=6, max_slots=1)
    one.submit(request(1, n_prompt=4, max_tokens=100))
    tokens = 0
    while True:
        (step,) = sent(one.next_instructions())
        outcomes = one.on_tokens(step.step, [1])
        tokens += 1
        if isinstance(outcomes[-1], SequenceFinished):
            assert outcomes[-1].reason is FinishReason.LENGTH
            break
    assert tokens == 2


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (request(1, n_prompt=0), UsageError, "prompt is empty"),
        (request(1, n_prompt=1, max_tokens=0), UsageError, "max-tokens"),
        (request(1, n_prompt=1024), CapacityError, "1024 tokens and the context holds 1024"),
        (request(1, n_prompt=1000, max_tokens=900), CapacityError, "room for 2"),
    ],
)
def test_what_can_never_run_is_refused(
    bad: SequenceRequest, error: type[ShardnetError], message: str
) -> None:
    one = scheduler(room_blocks=2)
    with pytest.raises(error, match=message):
        one.submit(bad)
    assert one.n_active == 0


def test_a_failed_step_fails_its_sequences_alone() -> None:
    one = scheduler()
    one.submit(request(1, n_prompt=2))
    one.submit(request(2, n_prompt=2))
    first, second = sent(one.next_instructions())
    cause = CapacityError("no room")
    assert one.on_step_failed(first.step, cause) == [
        SequenceFailed(sequence_id=SequenceId(1), error=cause)
    ]
    assert isinstance(one.on_tokens(second.step, [1])[0], TokenSampled)


def test_an_answer_to_no_step_is_our_own_bug() -> None:
    one = scheduler()
    one.submit(request(1, n_prompt=2))
    (step,) = sent(one.next_instructions())
    with pytest.raises(LocalProtocolError):
        one.on_tokens(StepId(step.step + 1), [1])
    with pytest.raises(LocalProtocolError):
        one.on_tokens(step.step, [1, 2])


@dataclass
class World:
    """What the ring and the clients see of a scheduler."""

    scheduler: Scheduler
    in_flight: deque[MicroBatch] = field(default_factory=deque)
    owner: dict[int, int] = field(default_factory=dict)
    next_position: dict[int, int] = field(default_factory=dict)
    ended: Counter[int] = field(default_factory=Counter)

    def pump(self) -> None:
        for instruction in self.scheduler.next_instructions():
            match instruction:
                case OpenSlot(sequence_id=sequence_id, slot=slot):
                    assert slot not in self.owner
                    self.owner[slot] = sequence_id
                    self.next_position[sequence_id] = 0
                case CloseSlot(sequence_id=sequence_id, slot=slot):
                    assert self.owner.pop(slot) == sequence_id
                case SendStep(batch=batch, is_decode=is_decode):
                    self.check(batch, is_decode)
                    self.in_flight.append(batch)
        assert len(self.in_flight) <= self.scheduler.max_in_flight
        assert 0 <= self.scheduler.booked_blocks <= self.scheduler.room_blocks
        assert len(self.owner) <= self.scheduler.max_slots

    def check(self, batch: MicroBatch, is_decode: bool) -> None:
        assert len(batch.token_ids) == batch.n_rows
        for group in batch.groups:
            assert self.owner[group.slot] == group.sequence_id
            assert group.position == self.next_position[group.sequence_id]
            end = group.position + group.n_rows
            self.next_position[group.sequence_id] = end
            if is_decode:
                assert group.n_rows == group.n_sampled == 1
            else:
                assert end % CHUNK == 0 or group.n_sampled == 1
                assert group.position % CHUNK == 0
                assert group.position // CHUNK == (end - 1) // CHUNK

    def take(self, outcomes: list[object]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, SequenceFinished | SequenceFailed):
                self.ended[outcome.sequence_id] += 1


events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 400)),
        st.tuples(st.just("answer"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
        st.tuples(st.just("end"), st.integers(1, 10), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(events=events, n_stages=st.integers(1, 4), max_slots=st.integers(1, 3))
def test_every_request_ends_exactly_once_whatever_happens(
    events: list[tuple[str, int, int]], n_stages: int, max_slots: int
) -> None:
    world = World(scheduler(n_stages=n_stages, room_blocks=3, max_slots=max_slots))
    submitted = 0
    for kind, number, max_tokens in events:
        match kind:
            case "submit":
                submitted += 1
                world.scheduler.submit(request(submitted, number, max_tokens))
            case "answer" if world.in_flight:
                batch = world.in_flight.popleft()
                world.take(world.scheduler.on_tokens(batch.step, [number] * batch.n_sampled))
            case "fail" if world.in_flight:
                batch = world.in_flight.popleft()
                world.take(world.scheduler.on_step_failed(batch.step, CapacityError("x")))
            case "end" if world.scheduler.end(SequenceId(number)):
                world.ended[number] += 1
        world.pump()
    for _ in range(10_000):
        if not world.in_flight:
            break
        batch = world.in_flight.popleft()
        world.take(world.scheduler.on_tokens(batch.step, [STOP_ID] * batch.n_sampled))
        world.pump()
    assert world.ended == Counter(range(1, submitted + 1))
    assert world.scheduler.n_active == world.scheduler.booked_blocks == 0
    assert not world.owner


@given(n_positions=st.integers(1, 10_000))
def test_blocks_hold_the_positions_and_no_more(n_positions: int) -> None:
    assert (blocks_for(n_positions) - 1) * 256 < n_positions <= blocks_for(n_positions) * 256
