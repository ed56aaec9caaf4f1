"""`--local N`: node processes for one run, gone afterwards whatever ends it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from support.soak import cases, is_soak
from support.system.nodes import Command, Machine
from support.system.parrot import Parrots
from test_readme import README, shortly, shown, telling

from shardnet.cluster.machine.local_nodes import LocalNodes

LONG = 8192
"""So many tokens of the slow model take minutes."""
LEAVE_S = 60.0
"""How long the node processes may outlive their parent. Those that are loading torch need it."""


def begin(machine: Machine, parrots: Parrots, n_nodes: int) -> Command:
    """Start a long generation over local nodes, which are no copies as its own process is."""
    return machine.begin_copy(
        *("generate", "a", "--model", str(parrots.big), "--local", str(n_nodes)),
        *("--context", str(LONG), "--max-tokens", str(LONG - 1)),
    )


def check_nothing_left(machine: Machine) -> None:
    """Check that no process of the machine is left, nor heard of.

    The file of a node that was too busy to leave in time, and so was killed, does not count.
    """
    _, alive = psutil.wait_procs(machine.processes(), timeout=LEAVE_S)
    assert not alive
    assert LocalNodes(machine.runtime_dir).list() == []


def test_the_readme_s_run_ends_with_its_nodes(machine: Machine) -> None:
    """In a folder that holds modules of a stranger, which no process imports.

    Nodes of a run are not set up as this machine's own.
    """
    machine.config_path.write_text('[node]\nhttp = "192.0.2.1:80"\nmemory = "1KiB"\n')
    for name in ("numpy.py", "torch.py", "shardnet/__init__.py", "shardnet/errors.py"):
        (machine.folder / name).parent.mkdir(exist_ok=True)
        (machine.folder / name).write_text("raise SystemExit(f'{__file__} is a stranger\\'s')")
    [command] = telling(shown(README, "generate"))
    assert "--local" in command
    result = machine.run(*shortly(command), "--json")
    assert len(result.json["token_ids"]) == 3
    check_nothing_left(machine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--local", "20"], "has 4 layers and every node needs one; give --local 4 or less"),
        (["--local", "3", "--layers", "0-2,2-4"], "2 ranges and --local starts 3 nodes"),
    ],
)
def test_more_nodes_than_stages_are_refused_before_any_starts(
    machine: Machine, parrots: Parrots, arguments: list[str], words: str
) -> None:
    result = machine.call("generate", "a", "--model", str(parrots.alphabet), *arguments)
    assert words in result.error
    assert "starting" not in result.stderr


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
@pytest.mark.parametrize("moment", cases(["starting 2 nodes"], ["ring: "]))
def test_interrupting_early_leaves_nothing(machine: Machine, parrots: Parrots, moment: str) -> None:
    """While the node processes start, and while they load, or just behind that."""
    starting = moment.startswith("starting")
    command = begin(machine, parrots, 2 if starting else 1)
    command.stderr.wait_for(moment)
    command.signal(signal.SIGINT)
    result = command.wait()
    assert result.code == 130
    assert result.stdout == "" or (not starting and result.stdout.startswith("b"))
    assert "Traceback" not in result.stderr
    check_nothing_left(machine)


def test_killing_the_parent_leaves_nothing(machine: Machine, parrots: Parrots) -> None:
    command = begin(machine, parrots, 1)
    command.stdout.wait_for("b")
    assert any("local-0" in process.cmdline() for process in machine.processes())
    command.kill()
    check_nothing_left(machine)


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_failure_leaves_nothing(machine: Machine) -> None:
    result = machine.run("generate", "a", "--model", "/nowhere", "--local", "1")
    assert "/nowhere" in result.error
    check_nothing_left(machine)


def test_a_run_goes_on_without_a_node_that_is_killed_and_interrupting_it_leaves_nothing(
    machine: Machine, parrots: Parrots
) -> None:
    """Nodes are started with their share of the cores."""
    command = begin(machine, parrots, 2)
    command.stdout.wait_for("b")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"starting 2 nodes on this machine, threads each: {share}" in command.stderr.text
    tail = next(p for p in machine.processes() if "local-1" in p.cmdline())
    assert "-P" in tail.cmdline(), "it may import what lies in the current folder"
    tail.kill()
    command.stderr.wait_for("recovering")
    command.stdout.wait_for("xyz", after=len(command.stdout.text))
    command.signal(signal.SIGINT)
    result = command.wait()
    assert result.code == 130
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "interrupted"
    check_nothing_left(machine)
