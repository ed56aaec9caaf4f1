"""A ring of one that runs any steps, to time what a token takes beside them."""

from __future__ import annotations

import threading
import time

import pytest

from shardnet.cluster.measuring.rehearsal import rehearse
from shardnet.errors import BusyError, ShardnetError
from shardnet.runtime.stage.worker import StageWorker

STEP_S = 0.002
"""Longer than a step that the loop's thread computes itself."""


@pytest.mark.parametrize("on_any_thread", [False, True])
def test_what_a_token_takes_beside_its_step_is_not_the_step(on_any_thread: bool) -> None:
    began_s: list[float] = []
    threads: set[threading.Thread] = set()

    def step() -> bool:
        began_s.append(time.perf_counter())
        threads.add(threading.current_thread())
        time.sleep(STEP_S)
        return len(began_s) < 30

    set_up_by: list[threading.Thread] = []
    between_s = rehearse(
        step,
        on_any_thread=on_any_thread,
        set_up=lambda: set_up_by.append(threading.current_thread()),
    )
    assert len(began_s) == 30
    assert 0 < between_s < (began_s[-1] - began_s[0]) / 29 - STEP_S / 2
    assert set_up_by[0] in threads
    assert threading.current_thread() not in threads or on_any_thread


def test_what_a_step_raises_ends_it() -> None:
    def step() -> bool:
        raise BusyError("somebody asked")

    with pytest.raises(BusyError, match="somebody asked"):
        rehearse(step, on_any_thread=False, set_up=lambda: None)


def test_a_worker_that_ends_by_a_bug_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(worker: StageWorker) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(StageWorker, "run", end)
    with pytest.raises(ShardnetError, match="internal error in a rehearsal"):
        rehearse(lambda: True, on_any_thread=False, set_up=lambda: None)
