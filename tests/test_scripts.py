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
