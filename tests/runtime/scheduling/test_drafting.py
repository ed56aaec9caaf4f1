"""Guesses by look-up, and how many of them are worth a step's rows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.runtime.scheduling.acceptance import Acceptance
from shardnet.runtime.scheduling.drafting import (
    MTP,
    NGRAM,
    SIZES,
    AdaptiveDrafter,
    NgramDrafts,
    RingDrafts,
)
from shardnet.runtime.scheduling.sequences import ALONE, Company
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
    """A draft_source that is right with a given chance: the text is all zeros."""

    kinds = range(31)
    flies = True

    def __init__(self, chance: float, seed: int = 1) -> None:
        self.chance = chance
        self.random = random.Random(seed)
        self.n_drafted = 0

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        self.n_drafted += 1
        return [int(self.random.random() >= self.chance) for _ in range(limit)]

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def close(self) -> None: ...


def step(drafter: AdaptiveDrafter, text: list[int], row_cost: float) -> list[int]:
    """Have one step of a text of zeros verified, and measured; return what was drafted."""
    drafts = drafter.propose(text, 31)
    drafter.cost.learn(1 + len(drafts), 1 + row_cost * len(drafts))
    n_right = next((n for n, draft in enumerate(drafts) if draft), len(drafts))
    if drafts:
        drafter.learn(len(drafts), n_right)
    text += [0] * (n_right + 1)
    return drafts


def proposals(chance: float, row_cost: float, n_steps: int = 400) -> list[int]:
    """How many guesses are made at each step, by a drafter that learns as it goes."""
    drafter, text = AdaptiveDrafter(draft_source=Coin(chance), cost=StepCost()), [0]
    return [len(step(drafter, text, row_cost)) for _ in range(n_steps)]


def test_good_guesses_on_cheap_rows_are_made_in_plenty() -> None:
    lengths = proposals(chance=0.97, row_cost=0.005)
    assert sum(lengths[100:]) / 300 > 12


def test_bad_guesses_on_dear_rows_are_hardly_made() -> None:
    lengths = proposals(chance=0.05, row_cost=0.3)
    assert sum(lengths[100:]) / 300 < 0.15


def test_a_drafter_that_had_given_up_comes_back_when_guesses_are_right() -> None:
    coin, text = Coin(0), [0]
    drafter = AdaptiveDrafter(draft_source=coin, cost=StepCost())
    for _ in range(60):
        step(drafter, text, 0.3)
    assert step(drafter, text, 0.3) == []
    coin.chance = 1
    for _ in range(20):  # what is not sent is judged too
        step(drafter, text, 0.3)
    assert len(step(drafter, text, 0.3)) > 2


def test_the_first_draft_is_tried_whatever_rows_seem_to_cost() -> None:
    """What a busy machine measured of others must not keep a text from trying."""
    cost = StepCost()
    cost.learn(1, 1.0)
    cost.learn(2, 3.5)
    drafter = AdaptiveDrafter(draft_source=Coin(1), cost=cost)
    for _ in range(9):
        drafter.took(1, 40.0)  # slow steps without drafts are not their fault
    assert [len(drafter.propose([0] * n, 31)) for n in range(1, 4)] == [1, 0, 0]


def test_kinds_that_are_new_are_as_good_as_their_drafter() -> None:
    """Acceptance is known by drafter, kind and depth, of which the narrowest counts most."""
    acceptance = Acceptance(0.7)
    assert acceptance.likely("mtp", 0, 0) == pytest.approx(0.7)
    for place in range(60):
        acceptance.judge(("mtp", 0, 0), is_right=True)
        acceptance.judge(("mtp", 5, 3), is_right=place % 4 == 0)
    assert acceptance.likely("mtp", 0, 0) > 0.95
    assert acceptance.likely("mtp", 5, 3) < 0.5
    assert 0.5 < acceptance.likely("mtp", 9, 4) < acceptance.likely("mtp", 0, 9)
    assert acceptance.likely("ngram", 0, 0) == pytest.approx(0.7), "the drafter is another"


def test_of_two_drafters_the_better_one_drafts_and_the_other_is_judged_on() -> None:
    first, looked_up, text = Coin(0.9), Coin(0.2, seed=2), [0]
    drafter = AdaptiveDrafter(
        draft_source=first, name="mtp", look_up=looked_up, cost=StepCost(), most=4
    )
    for _ in range(100):
        step(drafter, text, 0.1)
    counts = drafter.counts
    assert counts["mtp", "n_steps"] > 10 * counts["ngram", "n_steps"]
    first.chance, looked_up.chance = 0.1, 0.95
    before = counts["ngram", "n_steps"]
    for _ in range(100):
        step(drafter, text, 0.1)
    assert counts["ngram", "n_steps"] - before > 75, "it was known at once, for it had been judged"
    [ngram, mtp] = sorted(counts.told(), key=lambda told: told.drafter, reverse=True)
    assert mtp.n_tokens + ngram.n_tokens <= len(text) - 1
    assert mtp.n_accepted <= mtp.n_drafted


class Late(Coin):
    """Has drafts some time after it was asked for them."""

    def __init__(self, chance: float, takes_s: float) -> None:
        super().__init__(chance)
        self.takes_s, self.now_s, self.at_s = takes_s, 0.0, 0.0
        self.asked: list[int] = []
        self.ready = 0

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        if self.ready != len(tokens):
            self.asked.append(len(tokens))
            self.ready, self.at_s = len(tokens), self.now_s + self.takes_s
        return self.now_s >= self.at_s

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return super().draft(tokens, limit) if self.ready == len(tokens) else []


@pytest.mark.parametrize(
    ("takes_s", "looks_up", "share"), [(0.3, 0.0, 0.9), (3.0, 0.0, 0.2), (0.3, 0.98, 0.3)]
)
def test_a_drafter_is_waited_for_where_it_is_worth_its_time(
    takes_s: float, looks_up: float, share: float
) -> None:
    """Not one that takes longer than it saves, nor where look-up is as good and takes none."""
    late, text = Late(0.7, takes_s), [0]
    drafter = AdaptiveDrafter(
        draft_source=late,
        name="small",
        look_up=Coin(looks_up, seed=3),
        cost=StepCost(),
        most=6,
        clock=lambda: late.now_s,
    )
    n_steps = 200
    for _ in range(n_steps):
        while not drafter.prepare(text):
            late.now_s = late.at_s
        step(drafter, text, 0.1)
        late.now_s += 1
    n_asked = len(late.asked) / n_steps
    assert n_asked >= share if share > 0.5 else n_asked <= share


def test_a_drafter_that_is_late_once_is_asked_again() -> None:
    late, text = Late(0.9, 0.1), [0]
    cost = StepCost()
    drafter = AdaptiveDrafter(
        draft_source=late, name="small", cost=cost, most=6, clock=lambda: late.now_s
    )
    for n in range(60):
        late.takes_s = 12.0 if n == 30 else 0.1
        while not drafter.prepare(text):
            late.now_s = late.at_s
        step(drafter, text, 0.1)
        late.now_s += 1
    assert len(late.asked) > 50


def test_in_company_rows_cost_the_others_too() -> None:
    """Many texts share a step; those who have not asked for drafts are hardly slowed."""
    lengths = []
    for company in (ALONE, Company(7), Company(7, slack=0.03), Company(7, slack=0.2)):
        drafter = AdaptiveDrafter(draft_source=Coin(1), cost=StepCost(), most=8)
        for n_rows in (1, 9, 1, 9):
            drafter.cost.learn(n_rows, 1 + 0.2 * (n_rows - 1))
        drafter.propose([0], 31)
        lengths.append(len(drafter.propose([0] * 40, 31, company=company)))
    assert lengths[0] == 8
    assert lengths[1] <= lengths[0]
    assert lengths[2:] == [0, 2]


def test_a_draft_that_does_not_pay_is_asked_for_until_there_is_one() -> None:
    """The tail makes one now and then, at a moment of its own."""
    drafts, cost = RingDrafts(), StepCost()
    for n_rows, time_s in ((1, 1.0), (2, 1.2)):
        cost.learn(n_rows, time_s)
    drafter = AdaptiveDrafter(draft_source=drafts, cost=cost, acceptance=0.1)
    proposed = []
    for n_tokens in range(1, 40):
        if n_tokens in (5, 9, 21, 22, 30):
            drafts.take(n_tokens, [7])
        if drafter.propose([*range(n_tokens)], 31):
            proposed.append(n_tokens)
    assert proposed == [5]


def test_what_is_looked_up_goes_behind_drafts_of_the_ring() -> None:
    ring, text = RingDrafts(), [1, 2, 3, 4, 5, 6, 1, 2]
    drafter = AdaptiveDrafter(
        draft_source=ring, name=MTP, look_up=NgramDrafts(), cost=StepCost(), acceptance=0.9
    )
    ring.take(len(text), [3, 4])
    drafter.cost.most_rows = 2
    assert drafter.propose(text, 4) == [3, 4, 5]
    drafter.learn(3, 3)
    assert drafter.counts == {
        (MTP, "n_drafted"): 2,
        (MTP, "n_accepted"): 2,
        (NGRAM, "n_drafted"): 1,
        (NGRAM, "n_accepted"): 1,
        (MTP, "n_steps"): 1,
        (MTP, "n_tokens"): 4,
    }
    drafter.cost.most_rows = 4
    assert drafter.propose([*text, 3], 2) == [4, 5], "none by the ring are for so many tokens"
    drafter.learn(2, 1)
    assert drafter.counts[NGRAM, "n_accepted"] == 2


@pytest.mark.parametrize("most", [1, 5])
def test_the_cap_holds(most: int) -> None:
    cost = StepCost()
    cost.learn(32, 1.0)
    drafter = AdaptiveDrafter(draft_source=Coin(1), cost=cost, most=most)
    assert len(drafter.propose([1], 31)) == most
    cost.slowest = 0.5
    assert len(drafter.propose([1], 31, n_frames=2)) == most, "more drafts than it go behind"
