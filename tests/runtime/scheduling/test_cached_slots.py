"""What the head believes of slots, and what KV caches have, in any order of what may happen.

Stages come to their instructions as late as they like.
"""

from __future__ import annotations

import random

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
    STORED_PREFIX_POSITIONS,
    Epoch,
    SequenceId,
    StepId,
)

CONTEXT = 6 * BLOCK_POSITIONS
MOST = 5 * BLOCK_POSITIONS
"""Positions of a sequence: any room of a ring here has so many."""

KINDS = {
    "rows": (False, False),
    "windows": (True, False),
    "states": (False, True),
    "windows and states": (True, True),
}
"""Whether a layer has a window, and whether one keeps a state."""

EVENTS = {
    "submit": 14,
    "work": 8,
    "answer": 16,
    "restore": 4,
    "fail": 1,
    "end": 2,
    "drop": 1,
    "replace": 1,
    "follow": 8,
    "take_over": 1,
}
"""What happens, and how often."""


def beginning(seed: int, n_tokens: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i * seed) % 251 for i in range(n_tokens)]


class Model:
    """A ring, what was asked of it, and what it must say."""

    def __init__(self, kind: str, draws: random.Random) -> None:
        self.draws = draws
        has_window, self.keeps_state = KINDS[kind]
        ring = RingLimits(
            epoch=Epoch(1),
            n_stages=draws.randint(1, 3),
            room_blocks=draws.randint(5, 16),
            context=CONTEXT,
            max_slots=6,
            window=WINDOW if has_window else None,
            largest_window=WINDOW if has_window else None,
            room_states=draws.randint(10, 24) if self.keeps_state else None,
            limits=StepLimits(chunk_rows=64, mixed_rows=32, cheap_rows=8, exact_rows=4),
            prefix_seed=b"ring",
            shares_blocks=CachedStage(1, keeps_state=self.keeps_state).shares,
        )
        self.ring = LateRing(Scheduler(ring), has_window=has_window, keeps_state=self.keeps_state)
        self.asked: dict[SequenceId, SequenceRequest] = {}

    def take(self, kind: str) -> None:
        """Have one thing happen."""
        getattr(self, f"_{kind}")()
        self.ring.pump()

    def _prompt(self) -> tuple[int, ...]:
        """A new beginning, or what was asked or said before, whole, in part or with another token;
        then new ones."""
        draws = self.draws
        tokens = beginning(draws.randint(1, 2), draws.choice([20, 300, 560, 900]))
        if self.asked and draws.random() < 0.8:
            before = self.asked[draws.choice([*self.asked][-4:])]
            tokens = [*before.prompt, *self.ring.said.get(before.sequence_id, ())]
            n_kept = draws.choice([len(tokens), len(tokens), len(before.prompt), len(tokens) // 2])
            tokens = tokens[: max(1, n_kept - draws.choice([0, 0, 3]))]
            if draws.random() < 0.1:
                tokens[draws.randrange(len(tokens))] = 0
        new = beginning(draws.randint(3, 250), draws.choice([0, 1, 9, 60, 400]))
        return (*tokens, *new)[: MOST - 1]

    def _submit(self) -> None:
        draws = self.draws
        number, prompt = SequenceId(len(self.asked) + 1), self._prompt()
        max_tokens = draws.choice([0, 1, 5, 20, 40, 300])
        how = draws.choice(["plain"] * 6 + ["exact", "drafted", "flown", "urgent", "whole"])
        drafter = {"drafted": Oracle(errs=3), "exact": Oracle(errs=3, most=2)}.get(
            how, Oracle(errs=7, most=2) if how == "flown" else None
        )
        self.asked[number] = SequenceRequest(
            sequence_id=number,
            prompt=prompt,
            max_tokens=min(max_tokens, MOST - len(prompt)),
            stop_ids=frozenset({STOP_ID}),
            priority=int(how == "urgent"),
            deterministic=how == "exact",
            whole_prompt=how == "whole",
            drafter=drafter,
            n_stored=self._n_stored(prompt),
        )
        self.ring.scheduler.submit(self.asked[number])

    def _n_stored(self, prompt: tuple[int, ...]) -> int:
        if len(prompt) <= STORED_PREFIX_POSITIONS:
            return 0
        return self.ring.n_stored(prompt)

    def _work(self) -> None:
        rank = self.draws.randrange(len(self.ring.stages))
        self.ring.work(rank, self.draws.randint(1, 6))

    def _answer(self) -> None:
        for _ in range(min(self.draws.choice([1, 2, 12]), len(self.ring.in_flight))):
            self.ring.answer()

    def _restore(self) -> None:
        self.ring.restore(finds=self.draws.random() < 0.8)

    def _fail(self) -> None:
        error = self.draws.choice([CapacityError("no room"), WrongValuesError("not finite")])
        self.ring.failing[StepId(len(self.ring.sent) + self.draws.randint(1, 4))] = error

    def _end(self) -> None:
        number = SequenceId(self.draws.randint(1, len(self.asked) + 1))
        if self.ring.scheduler.end(number):
            self.ring.ended[number] += 1

    def _drop(self) -> None:
        self.ring.scheduler.queue.drop_warm()

    def _replace(self) -> None:
        self.ring.replace(moves=self.draws.random() < 0.5)

    def _follow(self) -> None:
        self.ring.follow(self.draws.choice([1, 2, 3, 4]))

    def _take_over(self) -> None:
        self.ring.take_over()

    def check_end(self) -> None:
        """Run to the end: all is said as it is alone, and nothing is left of it."""
        one, kv = self.ring, self.ring.scheduler.queue.kv_blocks
        one.run()
        assert one.ended == dict.fromkeys(self.asked, 1)
        for number, asked in self.asked.items():
            alone, said = text_of(asked.prompt, asked.max_tokens, CONTEXT, stop=True), one.said
            told = said.get(number, [])
            assert told == (alone if number in one.finished else alone[: len(told)])
        assert one.scheduler.n_active == 0
        kv = one.scheduler.queue.kv_blocks
        assert [stage.cache.blocks_used for stage in one.stages] == [kv.booked_blocks] * len(
            one.stages
        )
        one.scheduler.queue.drop_warm()
        one.run()
        assert kv.booked_blocks == 0
        for stage in one.stages:
            assert not stage.slots
            assert stage.cache.blocks_used == 0
            assert not stage.kept
            assert not stage.cache._kept


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12))
@given(seed=st.integers(0, 1 << 32), n_events=st.integers(1, 80))
def test_every_row_goes_on_from_what_its_slot_has_on_every_stage(
    kind: str, seed: int, n_events: int
) -> None:
    draws = random.Random(seed)
    model = Model(kind, draws)
    for event in draws.choices([*EVENTS], [*EVENTS.values()], k=n_events):
        model.take(event)
    model.check_end()


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_go_on_with_what_was_followed(kind: str) -> None:
    """Stages are anywhere when one is lost, maybe in the middle of a round, and maybe twice."""
    draws, n_followed = random.Random(7), 0
    events = EVENTS | {"submit": 3, "answer": 24, "follow": 30, "take_over": 3, "replace": 0}
    for _ in range(examples(8)):
        model = Model(kind, draws)
        for event in draws.choices([*events], [*events.values()], k=200):
            model.take(event if model.ring.scheduler.n_active else "submit")
        model.check_end()
        n_followed += model.ring.n_followed
    assert n_followed > 15
