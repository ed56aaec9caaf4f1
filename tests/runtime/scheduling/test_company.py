"""How long texts and prompts take beside each other, on timed stages in virtual time."""

from __future__ import annotations

import pytest
from support.chaos.virtual_time import run_virtually
from support.rings.timed_engine import TimedEngine, TimedStage, beside, during

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


@pytest.mark.parametrize("n_stages", [1, 2, 4])
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


@pytest.mark.parametrize("n_stages", [1, 2, 4])
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


@pytest.mark.parametrize("n_stages", [1, 2, 4])
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


@pytest.mark.parametrize("n_stages", [1, 2, 4])
@pytest.mark.parametrize("machine", ["vectors", "few vectors"])
def test_a_text_that_begins_beside_a_prompt_finds_what_it_takes_alone(
    machine: str, n_stages: int
) -> None:
    median, worst = run_virtually(during(TimedEngine(stages(machine, n_stages)), 4000))
    assert 1.8 <= median <= MOST_MEDIAN  # and the prompt has what it may have
    assert worst <= MOST_WORST
