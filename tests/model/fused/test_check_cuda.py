"""The check for GPUs, tried on a CPU: it runs to its end, and a part that fails is no end."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.needs import needs_vectors

SCRIPTS = Path(__file__).parents[3] / "scripts" / "cuda"


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """Run the script as Python does, and return what it exits with."""
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", *options])
    monkeypatch.syspath_prepend(SCRIPTS)  # where Python looks when it runs a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "check_cuda.py"), run_name="__main__")
    return ended.value.code


def test_it_says_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


@needs_vectors  # without them it computes what is stored in 16 bits in float32
def test_on_a_cpu_every_part_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--device", "cpu", "--small", "--layers", "2") == 0
    told = capsys.readouterr().out
    assert "failed" not in told
    assert told.count(" ok\n") == 6 + 5 + 3
    assert len(re.findall(r"\d of reading", told)) == 9
    assert told.count("µs a layer") == 4
    assert told.count("of copying") == 2


def test_a_part_that_fails_is_named_and_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    run_parts = runpy.run_path(str(SCRIPTS / "check_cuda.py"))["run_parts"]

    def breaks() -> Iterator[tuple[str, ...]]:
        yield "one", "ok"
        raise RuntimeError("no kernel\nfor this")

    def works() -> Iterator[tuple[str, ...]]:
        yield "two", "ok"

    now_s = iter(range(0, 1000, 10))
    parts = [("broken", breaks), ("good", works), ("late", works)]
    assert not run_parts(parts, 55.0, clock=lambda: next(now_s))
    told = capsys.readouterr().out
    assert "failed: RuntimeError: no kernel for this" in told
    assert told.count("two") == 1
    assert "late: left out, 55 s are over" in told
    assert run_parts([("good", works)], 55.0, clock=lambda: 0.0)
    assert not run_parts([("bad", lambda: [("x", "WRONG")])], 55.0, clock=lambda: 0.0)
