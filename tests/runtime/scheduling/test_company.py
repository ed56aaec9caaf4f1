"""How long texts and prompts take beside each other, on timed stages in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.chaos.virtual_time import run_virtually
from support.rings.timed_engine import (
    Company,
    TimedEngine,
    TimedStage,
    beside,
    during,
    left_alone,
    over_others,
)
from support.soak import cases

from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter

MOST_MEDIAN, MOST_WORST, MOST_PROMPT = 2.2, 4.0, 1.32
"""So many times as long as alone. On one stage a text at 2.2 leaves the prompt 1.25: it takes a
little more there, as the engine keeps below 2.2."""

MACHINES = {
    "vectors": TimedStage(read_s=0.027, row_s=0.0037, more_s=0.008),
    "few vectors": TimedStage(read_s=0.065, row_s=0.0186, more_s=0.02),
    "attention": TimedStage(read_s=0.027, row_s=0.0037, more_s=0.008, position_s=3e-7),
    "small model": TimedStage(read_s=0.001, row_s=0.001, more_s=0.002),
    "device": TimedStage(read_s=0.01, row_s=0.00001, more_s=0.002),
}
"""By what computes a whole model: vectors are a Xeon's thread as measured with a 1.1B in Q4_K_M."""


def stages(machine: str, n_stages: int) -> list[TimedStage]:
    whole = MACHINES[machine]
    part = TimedStage(
        read_s=whole.read_s / n_stages,
        row_s=whole.row_s / n_stages,
        more_s=whole.more_s / n_stages,
        position_s=whole.position_s / n_stages,
    )
    return [part] * n_stages


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize(
    ("machine", "n_prompt", "jitter"),
    [
        ("vectors", 1500, 0.0),
        ("vectors", 4000, 0.2),
        ("attention", 4000, 0.0),
        ("attention", 28_000, 0.0),
        ("device", 28_000, 0.0),
    ],
)
def test_a_text_and_a_prompt_beside_each_other_keep_their_bounds(
    machine: str, n_stages: int, n_prompt: int, jitter: float
) -> None:
    ring = TimedEngine(stages(machine, n_stages), jitter=jitter)
    company = run_virtually(beside(ring, 1, n_prompt, 1))
    assert max(company.medians) <= MOST_MEDIAN
    assert company.worst <= MOST_WORST
    n_begun = 7 * n_stages if machine == "device" else 0  # steps of 4 to 128 rows in place of 256
    assert company.prompt <= MOST_PROMPT + n_begun * 256 / n_prompt


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize(("n_texts", "n_prompts"), [(1, 4), (3, 1), (3, 4), (8, 2)])
def test_several_texts_and_prompts_share_fairly(
    n_stages: int, n_texts: int, n_prompts: int
) -> None:
    ring = TimedEngine(stages("vectors", n_stages))
    company = run_virtually(beside(ring, n_prompts, 1500, n_texts))
    assert max(company.medians) <= MOST_MEDIAN
    assert max(company.medians) <= 1.1 * min(company.medians)
    assert company.worst <= MOST_WORST
    n_rows = -(-n_texts // n_stages)
    step_s = 2.2 * max(0.027, 0.008 + 0.0037 * n_rows)
    left_s = step_s - 0.008 - 0.0037 * n_rows  # for rows of prompts
    assert company.prompt <= 1.1 * step_s / left_s


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize("machine", ["few vectors", "small model"])
def test_where_rows_cost_most_the_prompt_waits_and_not_the_text(
    machine: str, n_stages: int
) -> None:
    ring = TimedEngine(stages(machine, n_stages), hop_s=0.0001)
    company = run_virtually(beside(ring, 1, 1500, 1))
    assert max(company.medians) <= MOST_MEDIAN
    assert company.worst <= MOST_WORST
    assert company.prompt <= 2.05


def test_stages_of_unequal_speed_are_bounded_by_the_slowest() -> None:
    slow, fast = stages("vectors", 1)[0], stages("vectors", 4)[0]
    for ring in (TimedEngine([slow, fast]), TimedEngine([fast, slow], hop_s=0.002)):
        company = run_virtually(beside(ring, 1, 1500, 1))
        assert max(company.medians) <= MOST_MEDIAN
        assert company.worst <= MOST_WORST


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize("machine", ["vectors", "few vectors"])
def test_a_text_that_begins_beside_a_prompt_finds_what_it_takes_alone(
    machine: str, n_stages: int
) -> None:
    median, worst = run_virtually(during(TimedEngine(stages(machine, n_stages)), 4000))
    assert 1.8 <= median <= MOST_MEDIAN  # and the prompt has what it may have
    assert worst <= MOST_WORST


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize("machine", ["vectors", "device"])
def test_states_that_are_kept_cost_a_prompt_beside_a_text_hardly_a_step(
    machine: str, n_stages: int
) -> None:
    """Chunks end at every 256th position, where a state is kept."""

    def takes(room_states: int | None) -> Company:
        ring = TimedEngine(stages(machine, n_stages), room_states=room_states)
        return run_virtually(beside(ring, 1, 12_000, 1))

    kept, plain = takes(4000), takes(None)
    assert max(kept.medians) <= MOST_MEDIAN
    assert kept.worst <= MOST_WORST
    assert kept.prompt <= 1.06 * plain.prompt


class LateDrafts:
    """Wrong drafts that are there a moment after they were asked for (drafting.DraftSource)."""

    kinds: Sequence[int] = (0,)
    flies = False

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._n_asked = self._n_drafted = 0

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        if self._n_asked < len(tokens):
            self._n_asked = len(tokens)
            asyncio.get_running_loop().call_later(0.0005, self._on_drafted)
        return self._n_drafted == len(tokens)

    def _on_drafted(self) -> None:
        self._n_drafted = self._n_asked
        self._ready()

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return [8]

    def close(self) -> None: ...


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
def test_a_text_whose_drafts_come_a_moment_later_keeps_its_turn(
    n_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        AdaptiveDrafter, "prepare", lambda drafter, tokens: drafter.draft_source.prepare(tokens, 1)
    )
    ring = TimedEngine(
        stages("vectors", n_stages), text={"speculation": Speculation(make_draft_source=LateDrafts)}
    )
    company = run_virtually(beside(ring, 1, 4000, 1))
    assert max(company.medians) <= MOST_MEDIAN
    assert company.worst <= MOST_WORST
    assert company.prompt <= 1.45


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
@pytest.mark.parametrize(("machine", "most_prompt"), [("vectors", 3.2), ("device", 2.5)])
def test_a_prompt_that_goes_by_itself_keeps_the_texts_bound_too(
    machine: str, most_prompt: float, n_stages: int
) -> None:
    """A deterministic text is not batched with a prompt, nor a deterministic prompt with a text.

    The whole chunks of such a prompt go one by one: each is in one stage at a time, and steps with
    the texts' rows alone take about as long again.
    """
    ring = TimedEngine(stages(machine, n_stages), exact_rows=4, text={"deterministic": True})
    company = run_virtually(beside(ring, 1, 12_000, 1))
    assert max(company.medians) <= MOST_MEDIAN
    assert company.worst <= MOST_WORST
    assert company.prompt <= most_prompt
    ring = TimedEngine(stages(machine, n_stages), exact_rows=4, prompt={"deterministic": True})
    company = run_virtually(beside(ring, 1, 12_000, 1))
    assert max(company.medians) <= MOST_MEDIAN
    assert company.prompt <= 1 + 2 * n_stages


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
def test_a_text_that_is_left_alone_is_compared_with_what_it_takes_alone_then(
    n_stages: int,
) -> None:
    part = replace(stages("vectors", n_stages)[0], position_s=1.5e-6 / n_stages)
    ring = TimedEngine([part] * n_stages)
    assert run_virtually(left_alone(ring, 24_000, 15_000)) <= MOST_MEDIAN


@pytest.mark.parametrize("n_stages", cases([1, 4], [2]))
def test_what_rows_cost_on_other_stages_is_learnt_anew(n_stages: int) -> None:
    ring = TimedEngine(stages("device", n_stages))
    others = stages("vectors", n_stages)
    assert run_virtually(over_others(ring, others, 28_000)) <= MOST_WORST
