"""The programs of scripts/ begin: each is imported whole and explains its options.

What they measure is left to who runs them; mypy holds their calls to what they call.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
FOLDERS = (SCRIPTS, SCRIPTS / "benchmarks", SCRIPTS / "cuda")
PLACES = {path.name: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in PLACES.items()}
PROGRAMS = [name for name, source in SOURCES.items() if '__name__ == "__main__"' in source]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.syspath_prepend(PLACES[name].parent)  # where Python looks when it runs a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PLACES[name]), run_name="__main__")
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert told.err == ""
    usage, _, explained = told.out.partition("\n\n")
    assert usage.startswith("usage: ")
    assert explained
    options = re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', SOURCES[name])
    assert options
    assert set(options) <= set(re.findall(r"--[a-z0-9-]+", usage))


def test_each_other_source_is_part_of_a_program() -> None:
    imported = {
        f"{module}.py"
        for source in SOURCES.values()
        for module in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    }
    assert SOURCES.keys() - imported - set(PROGRAMS) == set()


def test_what_scripts_bench_starts_is_there() -> None:
    started = re.findall(
        r"scripts/benchmarks/(\w+\.py)", (SCRIPTS / "bench").read_text(encoding="utf-8")
    )
    assert len(started) > 3
    assert set(started) <= set(PROGRAMS)


def measured_by(name: str, *arguments: str) -> Any:
    """Run a program of scripts/benchmarks with the smallest models. Return what it measured."""
    small = ["--layers", "4", "--hidden", "128"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "benchmarks" / name), "--json", *small, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def agents_of(kinds: str, *arguments: str) -> dict[str, Any]:
    """Run scripts/bench agents on one node."""
    small = ["--nodes", "1", "--answer", "4", "--own", "40"]
    told: dict[str, Any] = measured_by("bench_agents.py", "--kind", kinds, *small, *arguments)
    return told


@pytest.mark.skipif(sys.platform == "win32", reason="nodes are started as Unix has them")
def test_agents_are_measured_beside_a_dense_model() -> None:
    told = agents_of("dense,hybrid", "--shared", "300")
    dense, hybrid = (told[kind]["cells"] for kind in ("dense", "hybrid"))
    assert dense.keys() == hybrid.keys()
    assert (dense["first"]["prompt"], dense["first"]["computed"]) == (340, 340)
    assert dense["next turn"]["computed"] == 42  # the last token of the answer, too, and its end
    assert dense["sub-agent"]["computed"] == 40
    assert hybrid["next turn"]["computed"] == 42
    assert hybrid["next turn"]["over_dense"] > 0
    assert "over_dense" not in dense["first"]


@pytest.mark.skipif(sys.platform == "win32", reason="nodes are started as Unix has them")
def test_long_prompts_and_many_conversations_of_agents_are_measured() -> None:
    long = agents_of("dense", "--long", "300")["dense"]
    assert [*long["cells"]] == ["first", "next turn", "after a restart"]
    assert long["first_tok_s"] > 0
    many = agents_of("dense", "--conversations", "2", "--conversation", "300", "--turns", "1")
    told = many["dense"]["conversations"]
    assert (told["computed_again"], told["known"]) == (0, 2 * 303)
    assert told["reused"] == {"memory": 2 * 303, "disk": 0}
    assert told["planned"]["positions"] >= 2 * 303
    [node] = told["nodes"]
    assert 0 < node["idle_bytes"] < node["full_bytes"]


@pytest.mark.skipif(sys.platform == "win32", reason="nodes are started as Unix has them")
def test_what_lost_and_drained_nodes_cost_is_measured() -> None:
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


@pytest.mark.parametrize(
    ("alone", "words"), [(450.4, "costs more than sharing"), (80, "A ring pays, ")]
)
def test_the_demo_says_what_it_shows_and_what_a_ring_is_for(
    alone: float,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Around stand-ins for the set-up and the command, which is run in other tests."""
    rates = iter((100, alone))

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "--last" in command:
            return subprocess.CompletedProcess(
                command, 0, json.dumps({"decode_tok_s": next(rates)})
            )
        assert command[-1] == "My prompt"
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", ["demo.py", "My prompt"])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("set_up.set_up_or_exit", lambda: None)
    runpy.run_path(str(SCRIPTS / "demo.py"), run_name="__main__")
    shown = capsys.readouterr().err
    assert "The prompt: My prompt" in shown
    assert "a ring of two nodes: 100 tokens per second" in shown
    assert f"one node alone: {round(alone)} tokens per second" in shown
    assert words in shown
