"""Guesses by look-up, and how many of them are worth a step's rows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.runtime.scheduling.drafting import SIZES, AdaptiveDrafter, NgramDrafts, RingDrafts
from shardnet.runtime.scheduling.step_cost import StepCost


def slow_guess(tokens: Sequence[int], limit: int) -> list[int]:
    """Look-up by reading all of the text, backwards."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                text = [*tokens]
                for place in range(limit):
                    text.append(text[end + place])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60)),
    limit=st.integers(1, 12),
)
def test_an_index_that_grows_guesses_what_a_search_finds(
    tokens: list[int], cuts: list[int], limit: int
) -> None:
    draft_source = NgramDrafts()
    for cut in sorted(cuts):
        draft_source.draft(tokens[:cut], limit)
    assert draft_source.draft(tokens, limit) == slow_guess(tokens, limit)


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    assert NgramDrafts().draft([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_drafts_in_flight_are_what_one_long_draft_would_be() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    drafts = NgramDrafts()
    whole = drafts.draft(text, 8)
    assert whole == [5, 6, 7, 8, 9, 1, 2, 3]
    assert drafts.draft(text, 4, whole[:4]) == whole[4:]
    assert [*drafts.kinds] == [4, 4, 4, 4]  # 8 to 11 tokens before it agree
    assert NgramDrafts().draft([1, 2, 1, 2, 1], 3, [2, 1, 2]) == [1, 2, 1]


def test_texts_that_have_ended_are_looked_up_too_the_last_first() -> None:
    texts: deque[NgramDrafts] = deque(maxlen=2)
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9]):
        one = NgramDrafts(before=texts)
        one.draft(text, 1)
        one.close()
    assert len(texts) == 2
    assert NgramDrafts(before=texts).draft([0, 2, 3, 4], 3) == [7, 8]
    assert NgramDrafts(before=texts).draft([0, 0, 3, 4], 3) == []


def test_what_agrees_further_counts_before_what_is_later() -> None:
    long, late = [1, 2, 3, 4, 5, 6, 7], [9, 4, 5, 6, 8]
    assert NgramDrafts().draft([*long, *late, *long[:6]], 1) == [7]
    assert NgramDrafts().draft([*long, *late, *long[2:6]], 1) == [8]


class Coin:
    """A draft_source that is right with a given chance."""

    kinds = range(31)
    flies = True

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.random = random.Random(1)

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return [0] * limit

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def close(self) -> None: ...

    def n_right(self, n_proposed: int) -> int:
        for place in range(n_proposed):
            if self.random.random() >= self.chance:
                return place
        return n_proposed


def proposals(chance: float, row_cost: float, n_steps: int = 400) -> list[int]:
    """How many guesses are made at each step, by a drafter that learns as it goes."""
    cost, coin = StepCost(), Coin(chance)
    drafter = AdaptiveDrafter(draft_source=coin, cost=cost)
    lengths = []
    for _ in range(n_steps):
        guesses = drafter.propose([1], 31)
        lengths.append(len(guesses))
        cost.learn(1 + len(guesses), 1 + row_cost * len(guesses))
        if guesses:
            drafter.learn(len(guesses), coin.n_right(len(guesses)))
    return lengths


def test_good_guesses_on_cheap_rows_are_made_in_plenty() -> None:
    lengths = proposals(chance=0.97, row_cost=0.005)
    assert sum(lengths[100:]) / 300 > 12


def test_bad_guesses_on_dear_rows_are_hardly_made() -> None:
    lengths = proposals(chance=0.05, row_cost=0.3)
    assert sum(lengths[100:]) / 300 < 0.15


def test_a_drafter_that_had_given_up_comes_back_when_guesses_are_right() -> None:
    cost, drafter = StepCost(), AdaptiveDrafter(draft_source=Coin(0), cost=StepCost())
    drafter.cost = cost
    for _ in range(60):
        guesses = drafter.propose([1], 31)
        cost.learn(1 + len(guesses), 1 + 0.3 * len(guesses))
        if guesses:
            drafter.learn(len(guesses), 0)
    assert drafter.propose([1], 31) == []
    for _ in range(400):
        guesses = drafter.propose([1], 31)
        cost.learn(1 + len(guesses), 1 + 0.3 * len(guesses))
        if guesses:
            drafter.learn(len(guesses), len(guesses))
    assert len(drafter.propose([1], 31)) > 2


def test_a_draft_that_does_not_pay_is_asked_for_until_there_is_one() -> None:
    """The tail makes one now and then, at a moment of its own."""
    drafts, cost = RingDrafts(), StepCost()
    for n_rows, time_s in ((1, 1.0), (2, 1.2)):
        cost.learn(n_rows, time_s)
    drafter = AdaptiveDrafter(draft_source=drafts, cost=cost, acceptance=0.1)
    assert drafter.length == 0
    proposed = []
    for n_tokens in range(1, 40):
        if n_tokens in (5, 21, 22, 30):
            drafts.take(n_tokens, [7])
        if drafter.propose([*range(n_tokens)], 31):
            proposed.append(n_tokens)
    assert proposed == [21]


def test_what_is_looked_up_goes_behind_drafts_of_the_ring() -> None:
    drafts, text = RingDrafts(), [1, 2, 3, 4, 5, 6, 1, 2]
    drafts.take(len(text), [3, 4])
    assert drafts.draft(text, 4) == [3, 4, 5, 6]
    assert drafts.draft(text, 1) == [3]
    ring, looked_up = [*drafts.kinds], NgramDrafts()
    assert drafts.draft([*text, 3], 2) == looked_up.draft([*text, 3], 2) == [4, 5]
    assert not {*ring} & {*drafts.kinds}, "each is judged by its own kind"
    drafts.take(len(text), [9, 9])
    assert drafts.draft(text, 4) == [9, 9]


@pytest.mark.parametrize("most", [1, 5])
def test_the_cap_holds(most: int) -> None:
    cost = StepCost()
    cost.learn(32, 1.0)
    drafter = AdaptiveDrafter(draft_source=Coin(1), cost=cost, most=most)
    assert len(drafter.propose([1], 31)) == most
    cost.slowest = 0.5
    assert len(drafter.propose([1], 31, n_frames=2)) == most, "more drafts than it go behind"
