"""Programs of scripts/benchmarks that start nodes, with the smallest models.

They run in this process, and their nodes are copies that know how fast this machine is: to start
each as they do costs 3 s of CPU.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.system import nodes

PROGRAMS = Path(__file__).parents[2] / "scripts" / "benchmarks"
Measure = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="nodes are started as Unix has them"
)


class CopyingMachine(nodes.Machine):
    """A machine of a program that asks for nodes as users start them."""

    def __init__(self, folder: Path, *, makes_copies: bool) -> None:
        assert not makes_copies
        super().__init__(folder)

    def processes(self) -> list[psutil.Process]:
        """End the nodes that still run, which is what programs look for processes for."""
        self.close()
        return []


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Give what runs a program and returns what it measured."""

    def measure(name: str, *arguments: str) -> Any:
        small = ["--json", "--layers", "4", "--hidden", "128"]
        monkeypatch.setattr(sys, "argv", [name, *small, *arguments])
        with contextlib.suppress(
            SystemExit
        ):  # of bench_losses: an answer that differs is in its JSON
            runpy.run_path(str(PROGRAMS / name), run_name="__main__")
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(nodes, "Machine", CopyingMachine)
    monkeypatch.syspath_prepend(PROGRAMS)
    return measure


def agents_of(measured_by: Measure, kinds: str, *arguments: str) -> dict[str, Any]:
    """Run scripts/bench agents on one node."""
    small = ["--nodes", "1", "--answer", "4", "--own", "40"]
    told: dict[str, Any] = measured_by("bench_agents.py", "--kind", kinds, *small, *arguments)
    return told


def test_agents_are_measured_beside_a_dense_model(measured_by: Measure) -> None:
    told = agents_of(measured_by, "dense,hybrid", "--shared", "300")
    dense, hybrid = (told[kind]["cells"] for kind in ("dense", "hybrid"))
    assert dense.keys() == hybrid.keys()
    assert (dense["first"]["prompt"], dense["first"]["computed"]) == (340, 340)
    assert dense["next turn"]["computed"] == 42  # the last token of the answer, too, and its end
    assert dense["sub-agent"]["computed"] == 40
    assert hybrid["next turn"]["computed"] == 42
    assert hybrid["next turn"]["over_dense"] > 0
    assert "over_dense" not in dense["first"]


def test_long_prompts_and_many_conversations_of_agents_are_measured(measured_by: Measure) -> None:
    long = agents_of(measured_by, "dense", "--long", "300")["dense"]
    assert [*long["cells"]] == ["first", "next turn", "after a restart"]
    assert long["first_tok_s"] > 0
    many = agents_of(
        measured_by, "dense", "--conversations", "2", "--conversation", "300", "--turns", "1"
    )
    told = many["dense"]["conversations"]
    assert (told["computed_again"], told["known"]) == (0, 2 * 303)
    assert told["reused"] == {"memory": 2 * 303, "disk": 0}
    assert told["planned"]["positions"] >= 2 * 303
    [node] = told["nodes"]
    assert 0 < node["idle_bytes"] < node["full_bytes"]


def test_what_lost_and_drained_nodes_cost_is_measured(measured_by: Measure) -> None:
    asked = [
        "--models",
        "mixture",
        "--nodes",
        "2",
        "--standby",
        "off",
        "--prompts",
        "40",
        "--drain",
        "30",
    ]
    killed, drained = measured_by("bench_losses.py", *asked, "--tokens", "24", "--after", "12")
    assert (killed["lost"], killed["prompt"]) == ("tail", 40)
    assert (drained["lost"], drained["prompt"]) == ("drained", 30)
    assert killed["is_equal"]
    assert drained["is_equal"]
    assert 40 + 12 <= killed["again"] + 1 <= 40 + 24
    assert killed["pause_s"] > killed["load_s"] > 0
    assert (drained["again"], drained["load_s"]) == (0, 0)
