"""What rows cost, and how many more are worth it, from the times of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.runtime.scheduling.step_cost import StepCost

CHOICES = (8, 16, 32, 64, 128)


@given(base=st.floats(0.01, 1), slope=st.floats(0.0001, 0.1))
def test_the_cost_of_rows_is_found_from_steps(base: float, slope: float) -> None:
    cost = StepCost()
    for n_rows in (1, 5, 2, 9, 1, 17):
        cost.learn(n_rows, base + slope * n_rows)
    assert cost.extra(4) == pytest.approx(4 * slope / (base + slope), rel=1e-3)


def test_before_rows_differ_nothing_is_known_of_their_cost() -> None:
    cost = StepCost()
    assert cost.extra(8) == 0
    for _ in range(5):
        cost.learn(1, 0.1)
    assert cost.extra(8) == 0


@given(
    start=st.floats(0.001, 1),
    row=st.floats(0.00001, 0.1),
    beside=st.integers(1, 40),
    slowdown=st.floats(1.1, 4),
)
def test_the_most_rows_that_keep_a_step_within_its_bound(
    start: float, row: float, beside: int, slowdown: float
) -> None:
    cost = StepCost()
    for n_rows in (beside, beside + 16, beside, beside + 8, beside + 16):
        cost.learn(n_rows, start + row * n_rows)
    chosen = cost.most_rows_beside(beside, slowdown, CHOICES)

    def takes(n_rows: int) -> float:
        return start + row * n_rows

    bound = slowdown * takes(beside)
    assert chosen == CHOICES[0] or takes(beside + chosen) <= bound * 1.001
    larger = [choice for choice in CHOICES if choice > chosen]
    assert not larger or takes(beside + larger[0]) >= bound * 0.999


def test_rows_that_cost_nothing_are_taken_as_many_as_may_be() -> None:
    cost = StepCost()
    for n_rows in (4, 20, 4, 36):
        cost.learn(n_rows, 0.05)
    assert cost.most_rows_beside(4, 2.0, CHOICES) == 128


def test_what_rows_cost_is_learnt_anew_when_it_changes() -> None:
    cost = StepCost(half_life=8)
    for time_s in (0.001, 0.01):
        for _ in range(40):
            cost.learn(4, 0.05 + 4 * time_s)
            cost.learn(20, 0.05 + 20 * time_s)
    assert cost.extra(10) == pytest.approx(10 * 0.01 / 0.06, rel=0.1)
