"""Whether other programs took processors from this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from shardnet.runtime.processors import processor_use
from shardnet.runtime.processors.processor_use import ProcessorUse

BEFORE = ProcessorUse.now()


def after(*, idle: float, own: float, waited: float = 0.0, n_cores: int = 4) -> ProcessorUse:
    """Return the counters two seconds later, with so many cores idle, ours, and waited for."""
    return replace(
        BEFORE,
        at_s=BEFORE.at_s + 2,
        n_cores=n_cores,
        idle_s=BEFORE.idle_s + 2 * idle,
        own_s=BEFORE.own_s + 2 * own,
        waited_s=BEFORE.waited_s + 2 * waited,
    )


@pytest.mark.parametrize(
    ("later", "is_disturbed", "is_quiet"),
    [
        (after(idle=0, own=4), False, True),
        (after(idle=2.9, own=1), False, True),
        (after(idle=2, own=1), False, False),
        (after(idle=0, own=3), True, False),
        (after(idle=0, own=2), True, False),
        (after(idle=3, own=0.8, waited=0.2), True, True),
        (BEFORE, False, True),
    ],
    ids=["all ours", "one ours", "others beside", "a hog", "half", "waited", "no time"],
)
def test_others_disturb_where_they_leave_nothing(
    later: ProcessorUse, is_disturbed: bool, is_quiet: bool
) -> None:
    before = replace(BEFORE, n_cores=4)
    assert (before.disturbed(later), before.quiet(later)) == (is_disturbed, is_quiet)


def test_the_systems_counters_grow() -> None:
    later = ProcessorUse.now()
    assert later.at_s > BEFORE.at_s
    assert later.own_s > BEFORE.own_s
    assert later.idle_s >= BEFORE.idle_s
    assert later.n_cores >= 1


def test_counters_that_fail_tell_neither_rest_nor_disturbance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> NoReturn:
        raise OSError(22, "Invalid function")

    monkeypatch.setattr(psutil, "cpu_times", fail)
    before = ProcessorUse.now()
    later = replace(ProcessorUse.now(), at_s=before.at_s + 2)
    assert (before.disturbed(later), before.quiet(later)) == (False, False)


def test_a_thread_that_has_just_ended_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        if number % 2:
            (tmp_path / str(number) / "schedstat").write_text("5 1000000000 7\n")
    monkeypatch.setattr(processor_use, "_TASKS", tmp_path)
    assert ProcessorUse.now().waited_s == 4
    monkeypatch.setattr(processor_use, "_TASKS", tmp_path / "elsewhere")
    assert ProcessorUse.now().waited_s == 0
