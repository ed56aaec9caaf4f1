"""What the head believes of slots, and what KV caches have, in any order of what may happen.

Stages come to their instructions as late as they like.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings.cached_ring import WINDOW, CachedStage, LateRing
from support.rings.toy_ring import STOP_ID, Oracle, text_of
from support.soak import examples

from shardnet.errors import CapacityError, WrongValuesError
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.types import (
    BLOCK_POSITIONS,
    MAX_STATE_DRAFTS,
    STORED_PREFIX_POSITIONS,
    Epoch,
    SequenceId,
    StepId,
)

CONTEXT = 4 * BLOCK_POSITIONS
MOST = 3 * BLOCK_POSITIONS
"""Positions of a sequence: any room of a ring here has so many."""

KINDS = {
    "rows": (False, False),
    "windows": (True, False),
    "states": (False, True),
    "windows and states": (True, True),
}
"""Whether a layer has a window, and whether one keeps a state."""

submits = st.tuples(
    st.just("submit"),
    st.integers(0, 9),  # the sequence whose tokens it begins with; with 0 to 2 a new beginning
    st.integers(1, 300) | st.integers(400, 700),  # with how many of them
    st.integers(0, 60) | st.integers(200, 300),  # new tokens
    st.integers(0, 40) | st.integers(200, 400),  # tokens to make
    st.sampled_from(["plain", "plain", "exact", "drafted", "flown", "urgent", "whole"]),
)
events = st.lists(
    st.one_of(
        submits,
        submits,
        st.tuples(st.just("work"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("answer"), st.integers(1, 12)),
        st.tuples(st.just("restore"), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("end"), st.integers(1, 12)),
        st.tuples(st.just("drop")),
        st.tuples(st.just("replace"), st.booleans()),
    ),
    max_size=60,
)


def beginning(seed: int, n_tokens: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i * seed) % 251 for i in range(n_tokens)]


class Model:
    """A ring, what was asked of it, and what it must say."""

    def __init__(self, kind: str, n_stages: int, room_blocks: int, room_states: int) -> None:
        has_window, self.keeps_state = KINDS[kind]
        ring = RingLimits(
            epoch=Epoch(1),
            n_stages=n_stages,
            room_blocks=room_blocks,
            context=CONTEXT,
            max_slots=6,
            window=WINDOW if has_window else None,
            largest_window=WINDOW if has_window else None,
            room_states=room_states if self.keeps_state else None,
            limits=StepLimits(chunk_rows=64, mixed_rows=32, cheap_rows=8, exact_rows=4),
            prefix_seed=b"ring",
            shares_blocks=CachedStage(1, keeps_state=self.keeps_state).shares,
        )
        self.ring = LateRing(Scheduler(ring), has_window=has_window, keeps_state=self.keeps_state)
        self.asked: dict[SequenceId, SequenceRequest] = {}

    def take(self, kind: str, *how: object) -> None:
        """Have one thing happen."""
        getattr(self, f"_{kind}")(*how)
        self.ring.pump()

    def _submit(self, of: int, n_kept: int, n_new: int, max_tokens: int, how: str) -> None:
        number = SequenceId(len(self.asked) + 1)
        before = self.asked.get(SequenceId(of - 2))
        tokens = (
            beginning(of % 3, n_kept)
            if before is None
            else [*before.prompt, *self.ring.said.get(before.sequence_id, ())][:n_kept]
        )
        prompt = (*tokens, *beginning(number + 5, n_new))[: MOST - 1]
        drafter = {"drafted": Oracle(errs=3), "exact": Oracle(errs=3, most=2)}.get(
            how, Oracle(errs=7, most=2) if how == "flown" else None
        )
        if self.keeps_state and drafter is not None:
            drafter.most = MAX_STATE_DRAFTS
        self.asked[number] = SequenceRequest(
            sequence_id=number,
            prompt=prompt,
            max_tokens=min(max_tokens, MOST - len(prompt)),
            stop_ids=frozenset({STOP_ID}),
            priority=int(how == "urgent"),
            deterministic=how == "exact",
            whole_prompt=how == "whole",
            drafter=drafter,
            n_drafts=MAX_STATE_DRAFTS if self.keeps_state and drafter else 0,
            n_stored=self._n_stored(prompt),
        )
        self.ring.scheduler.submit(self.asked[number])

    def _n_stored(self, prompt: tuple[int, ...]) -> int:
        if len(prompt) <= STORED_PREFIX_POSITIONS:
            return 0
        return self.ring.n_stored(prompt)

    def _work(self, rank: int, n_instructions: int) -> None:
        self.ring.work(rank % len(self.ring.stages), n_instructions)

    def _answer(self, n_steps: int) -> None:
        for _ in range(min(n_steps, len(self.ring.in_flight))):
            self.ring.answer()

    def _restore(self, finds: bool) -> None:
        self.ring.restore(finds=finds)

    def _fail(self, n_before: int, for_room: bool) -> None:
        error = CapacityError("no room") if for_room else WrongValuesError("not finite")
        self.ring.failing[StepId(len(self.ring.sent) + n_before + 1)] = error

    def _end(self, number: int) -> None:
        if self.ring.scheduler.end(SequenceId(number)):
            self.ring.ended[SequenceId(number)] += 1

    def _drop(self) -> None:
        self.ring.scheduler.drop_warm()

    def _replace(self, moves: bool) -> None:
        self.ring.replace(moves=moves)

    def check_end(self) -> None:
        """Run to the end: all is said as it is alone, and nothing is left of it."""
        one, kv = self.ring, self.ring.scheduler.kv_blocks
        one.run()
        assert one.ended == dict.fromkeys(self.asked, 1)
        for number, asked in self.asked.items():
            alone, said = text_of(asked.prompt, asked.max_tokens, CONTEXT, stop=True), one.said
            told = said.get(number, [])
            assert told == (alone if number in one.finished else alone[: len(told)])
        assert one.scheduler.n_active == 0
        kv = one.scheduler.kv_blocks
        assert [stage.cache.blocks_used for stage in one.stages] == [kv.booked_blocks] * len(
            one.stages
        )
        one.scheduler.drop_warm()
        one.run()
        assert kv.booked_blocks == 0
        for stage in one.stages:
            assert not stage.slots
            assert stage.cache.blocks_used == 0
            assert not stage.kept
            assert not stage.cache._kept


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(
    events=events,
    n_stages=st.integers(1, 3),
    room_blocks=st.integers(3, 9),
    room_states=st.integers(10, 24),
)
def test_every_row_goes_on_from_what_its_slot_has_on_every_stage(
    kind: str,
    events: list[tuple[str, object]],
    n_stages: int,
    room_blocks: int,
    room_states: int,
) -> None:
    model = Model(kind, n_stages, room_blocks, room_states)
    for event in events:
        model.take(*event)
    model.check_end()
