"""How fast one sequence is whose drafts fly, in virtual time, and that it is never slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.rings.timed_ring import Erring, MtpRing, TimedRing

from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, RingDrafts

USUAL = [0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]
EASY = [0.95, 0.94, 0.93, 0.92, 0.91, 0.9]
"""How often the tail's first draft is right, and each further one where those before it are."""


def speeds(ring: TimedRing, right: float, *, flies: bool, n_tokens: int) -> tuple[float, float]:
    """Tokens a second, and those of the slowest 200 in a row."""
    drafter = AdaptiveDrafter(draft_source=Erring(right, flies=flies), cost=ring.cost)
    return ring.speed(drafter, n_tokens), ring.least_speed()


@pytest.mark.parametrize(
    ("n_stages", "row_cost", "right", "at_least"),
    [(2, 0.3, 0.6, 1.1), (2, 0.3, 0.9, 1.25), (4, 0.3, 0.8, 1.5), (2, 0.05, 0.9, 1.03)],
)
def test_drafts_in_flight_are_faster_than_drafts_that_wait(
    n_stages: int, row_cost: float, right: float, at_least: float
) -> None:
    stages_s = [0.1 / n_stages] * n_stages
    waits, flies = (
        speeds(TimedRing(stages_s, row_cost, hop_s=0.001), right, flies=flies, n_tokens=300)[0]
        for flies in (False, True)
    )
    assert flies / waits >= at_least


@pytest.mark.parametrize(
    ("n_stages", "row_cost", "right", "draft_cost", "at_least"),
    [
        (2, 0.2, USUAL, 0.02, 1.0),
        (4, 0.2, USUAL, 0.02, 1.1),
        (2, 0.2, EASY, 0.02, 1.05),
        (4, 0.2, EASY, 0.05, 1.1),
        (2, 0.02, EASY, 0.02, 1.0),
        (2, 0.02, USUAL, 0.05, 0.96),
        (1, 0.2, USUAL, 0.02, 1.0),
    ],
)
def test_drafts_of_the_tail_fly_where_that_is_faster(
    n_stages: int, row_cost: float, right: Sequence[float], draft_cost: float, at_least: float
) -> None:
    """They are less likely the deeper they are, and each takes its time in the last stage."""
    found = []
    for flies in (False, True):
        source = RingDrafts()
        source.flies = flies
        ring = MtpRing(
            [0.1 / n_stages] * n_stages,
            row_cost,
            hop_s=0.001,
            right=right,
            draft_s=0.1 * draft_cost,
            source=source,
        )
        found.append(ring.speed(AdaptiveDrafter(draft_source=source, cost=ring.cost), 800))
    assert found[1] >= at_least * found[0]


@pytest.mark.parametrize("right", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(
    ("stages_s", "row_cost", "contention"),
    [([0.05, 0.05], 1.0, 1.0), ([0.05, 0.05], 0.3, 2.2), ([0.07, 0.03], 0.2, 1.0)],
)
def test_drafts_are_never_slower_than_plain_decoding(
    stages_s: list[float], row_cost: float, contention: float, right: float
) -> None:
    """Whatever they cost: 0.97 of its speed over any 200 tokens."""
    plain = TimedRing(stages_s, row_cost, contention=contention).speed(None, 50)
    ring = TimedRing(stages_s, row_cost, contention=contention)
    assert speeds(ring, right, flies=True, n_tokens=300)[1] >= 0.97 * plain
