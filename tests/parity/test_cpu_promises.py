"""What a device's report says of a CPU: that it keeps what is promised, and where it does not."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.soak import cases

from shardnet.model.kernels.library import Isa, native_kernels

SCRIPTS = Path(__file__).parents[2] / "scripts"

_native = native_kernels()
pytestmark = pytest.mark.skipif(
    _native is None or _native.isa is Isa.PORTABLE, reason="takes minutes without vectors"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS / "benchmarks")
    monkeypatch.syspath_prepend(SCRIPTS / "cuda")
    return importlib.import_module("cpu_promises")


def test_this_cpu_keeps_what_is_promised(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of codes, of floats below; the long form tries every form. test_exactness.py has them all."""
    *others, last = script.FORMS
    monkeypatch.setattr(script, "FORMS", cases([last], others))
    name, *rows = [*script.promises()]
    assert name[0] == "class of this CPU"
    assert len(rows) == len(script.FORMS)
    assert {row[2:] for row in rows} == {("same bits", "")}


def test_a_way_that_changes_bits_is_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = script._logits

    def perturbed(chain: Any, *rows: Any) -> torch.Tensor:
        logits: torch.Tensor = usual(chain, *rows).clone()
        if len(chain) > 1:
            logits[5:8, 3] = torch.nextafter(logits[5:8, 3], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(script, "_logits", perturbed)
    monkeypatch.setattr(script, "FORMS", script.FORMS[1:2])
    assert [*script.promises()][1][2:] == ("WRONG", "a stage a layer: 3 of 140 rows")
