"""How fast one sequence is whose drafts fly, in virtual time, and that it is never slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.rings.timed_ring import Erring, MtpRing, TimedRing
from support.soak import cases

from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, DraftSource, RingDrafts

USUAL = [0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]
EASY = [0.95, 0.94, 0.93, 0.92, 0.91, 0.9]
"""How often the tail's first draft is right, and each further one where those before it are."""


class Waited(Erring):
    """Takes `takes_s` for its drafts, on a thread of its own."""

    def __init__(self, *right: float, takes_s: float, ring: TimedRing) -> None:
        super().__init__(*right, flies=False)
        self._takes_s, self._ring = takes_s, ring
        self._asked, self._ready_s = 0, 0.0

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        if self._asked != len(tokens):
            self._asked, self._ready_s = len(tokens), self._ring.now_s + self._takes_s
            self._ring.wakes_s = self._ready_s
        return self._ring.now_s >= self._ready_s

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return super().draft(tokens, limit) if self._asked == len(tokens) else []


def speeds(ring: TimedRing, right: float, *, flies: bool, n_tokens: int) -> tuple[float, float]:
    """Tokens a second, and those of the slowest 200 in a row."""
    drafter = AdaptiveDrafter(draft_source=Erring(right, flies=flies), cost=ring.cost)
    return ring.speed(drafter, n_tokens), ring.least_speed()


STAGES_S = cases([[0.1], [0.025] * 4], [[0.05, 0.05]])
GOOD, BAD, FADES, COMES = (0.8,), (0.0,), (0.9, 0.0), (0.0, 0.9)


def mixed(
    stages_s: Sequence[float],
    row_cost: float,
    kind: str,
    right: Sequence[float],
    looked_up: Sequence[float] | None,
    takes_s: float = 0.0,
) -> TimedRing:
    """Decode a text with the tail's drafts or a model's, which take time, and look-up."""
    tail = MtpRing(
        stages_s, row_cost, hop_s=0.001, right=[1.0], parts=right or (0.0,), draft_s=takes_s
    )
    ring = tail if kind == "mtp" else TimedRing(stages_s, row_cost, hop_s=0.001)
    waited = Waited(*right, takes_s=takes_s, ring=ring)
    source: DraftSource = tail.source if kind == "mtp" else waited
    drafter = AdaptiveDrafter(
        draft_source=source,
        name=kind,
        look_up=Erring(*looked_up, flies=True, seed=5) if looked_up else None,
        cost=ring.cost,
        clock=lambda: ring.now_s,
    )
    ring.speed(drafter if right else None, 450)
    return ring


def speed(ring: TimedRing) -> float:
    return (len(ring.times_s) - 1) / (ring.times_s[-1] - ring.times_s[0])


@pytest.mark.parametrize("stages_s", STAGES_S, ids=str)
@pytest.mark.parametrize("row_cost", cases([0.3], [0.05, 1.0]))
@pytest.mark.parametrize(("kind", "takes_s"), [("mtp", 0.01), ("small", 0.05)])
@pytest.mark.parametrize(
    ("right", "looked_up"),
    [(BAD, None), (BAD, BAD), (FADES, COMES), (COMES, BAD), (GOOD, BAD), (BAD, FADES)],
)
def test_no_mix_of_drafters_is_slower_than_plain_decoding(
    stages_s: list[float],
    row_cost: float,
    kind: str,
    takes_s: float,
    right: tuple[float, ...],
    looked_up: tuple[float, ...] | None,
) -> None:
    """Wrong ones, those that turn bad in mid-text, those that are waited for in vain."""
    plain = speed(mixed(stages_s, row_cost, kind, (), None, takes_s))
    assert mixed(stages_s, row_cost, kind, right, looked_up, takes_s).least_speed() >= 0.97 * plain


@pytest.mark.parametrize("stages_s", STAGES_S, ids=str)
@pytest.mark.parametrize("row_cost", [0.05, 0.3])
@pytest.mark.parametrize(("kind", "takes_s"), [("mtp", 0.005), ("small", 0.03)])
def test_drafters_side_by_side_are_as_good_as_the_better_of_them(
    stages_s: list[float], row_cost: float, kind: str, takes_s: float
) -> None:
    """One is good where the other is not."""
    alone = [
        speed(mixed(stages_s, row_cost, kind, FADES, None, takes_s)),
        speed(mixed(stages_s, row_cost, kind, BAD, COMES, takes_s)),
    ]
    both = speed(mixed(stages_s, row_cost, kind, FADES, COMES, takes_s))
    assert both >= max(alone)


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
