"""Whoever reads what a command or a node writes goes away, or was never there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.soak import cases, is_soak
from support.system.nodes import Machine, open_machine
from support.system.parrot import Parrots

CUT = '{ "$@" 2>&1; echo "left with $?" >&3; } 3>&2 | grep -m 1 "^{"'
"""A shell's line: run a command, read what it writes up to what a node says of itself, leave."""
CUT_TEXT = '{ "$@"; echo "left with $?" >&2; } | head -c 1'


def through_shell(folder: Path, line: str) -> Machine:
    """A machine whose commands are run by a line of a shell, which has them as "$@"."""
    folder.mkdir()
    return Machine(folder, prefix=("sh", "-c", line, "sh"))


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """What the tests' own parent ignores, as under nohup, is not ignored by what they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", cases([signal.SIGHUP], [signal.SIGTERM, signal.SIGINT]))
def test_a_node_that_nobody_listens_to_serves_and_leaves(
    tmp_path: Path, parrots: Parrots, number: signal.Signals
) -> None:
    machine = through_shell(tmp_path / "cut", CUT)
    try:
        [node] = machine.start_nodes("anna")
        with open_machine(tmp_path / "client") as client:
            asked = ["--model", str(parrots.signs), "--nodes", node.address]
            assert client.call("generate", "a", *asked).code == 0
        os.kill(node.ready["pid"], number)
        assert "left with 0" in node.wait().stderr
        assert not [*machine.runtime_dir.iterdir()]
    finally:
        machine.close()


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_text_that_nobody_reads_on_ends_quietly(tmp_path: Path, parrots: Parrots) -> None:
    machine = through_shell(tmp_path / "cut", CUT_TEXT)
    result = machine.run("generate", "a", "--model", str(parrots.big), "--max-tokens", "4000")
    assert result.stdout == "b"
    [*said, end] = result.stderr.splitlines()
    assert end == "left with 1"
    assert "ring: " in said[-1], said


def test_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    machine = through_shell(tmp_path / "full", 'exec "$@" >/dev/full')
    error = machine.run("cache", "ls", "--json").error
    assert error.startswith("standard output cannot be written: No space left on device")
    assert machine.run("--help").error.startswith("there is no room to write: ")


def test_streams_that_are_closed_before_the_start_are_done_without(tmp_path: Path) -> None:
    """Without them the event loop would take their numbers, and end the process at its close."""
    machine = through_shell(tmp_path / "closed", 'exec "$@" <&- >&- 2>&-')
    assert machine.run("nodes", "--json").code == 0
