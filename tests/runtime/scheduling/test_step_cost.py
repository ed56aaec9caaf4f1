"""What rows cost, and how many more are worth it, from the times of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.runtime.scheduling.step_cost import StepCost, TripCost

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
    alone=st.floats(0.001, 1),
    row=st.floats(0.00001, 0.1),
    slowdown=st.floats(1.1, 4),
)
def test_the_most_rows_that_keep_a_trip_within_its_bound(
    alone: float, row: float, slowdown: float
) -> None:
    cost = TripCost()
    for n_rows in (8, 16, 4):
        cost.learn(n_rows, alone + row * n_rows, alone)
    chosen = cost.most_rows(alone, slowdown, CHOICES)
    assert chosen == CHOICES[0] or alone + row * chosen <= slowdown * alone * 1.001
    larger = [choice for choice in CHOICES if choice > chosen]
    assert not larger or alone + row * larger[0] >= slowdown * alone * 0.999


def test_rows_that_cost_nothing_are_taken_as_many_as_may_be() -> None:
    cost = TripCost()
    for n_rows in (4, 20, 4, 36):
        cost.learn(n_rows, 0.05, 0.05)
    assert cost.most_rows(0.05, 2.0, CHOICES) == 128


def test_alone_a_trip_waits_for_the_other_steps_in_the_slowest_stage() -> None:
    cost = TripCost()
    assert cost.alone_s(3, 2) is None
    cost.alone.learn(3, 0.1, 0.075)
    assert cost.alone_s(3, 1) == pytest.approx(0.1)
    assert cost.alone_s(3, 2) == pytest.approx(0.15)


def test_steps_in_flight_say_how_many_rows_are_known() -> None:
    """Else frames that fly would stay as short as the first of them."""
    cost = StepCost()
    for n_rows in (1, 3, 1):
        cost.learn(n_rows, 1 + 0.1 * n_rows)
    cost.learn(7, 1.9, flies=True)
    assert cost.most_rows == 7
    assert cost.company > 1


def test_what_rows_cost_is_learnt_anew_when_it_changes() -> None:
    cost = StepCost(half_life=8)
    for time_s in (0.001, 0.01):
        for _ in range(40):
            cost.learn(4, 0.05 + 4 * time_s)
            cost.learn(20, 0.05 + 20 * time_s)
    assert cost.extra(10) == pytest.approx(10 * 0.01 / 0.06, rel=0.1)
