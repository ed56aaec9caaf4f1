"""A cluster whose nodes are of this release and of the one before: rings of both, both as head."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from support.soak import cases
from support.system import released
from support.system.nodes import Machine, NodeProcess, Result
from support.system.parrot import Parrots

from shardnet import __version__

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="0.2.0's commands end with an error on this Python"
)
SAID = ("--max-tokens", "24", "--seed", "7", "--temperature", "0.8", "--logprobs", "2", "--json")


@dataclass(frozen=True, kw_only=True)
class Both:
    """A machine and a node of each release: `old` and `new`."""

    old_machine: Machine
    new_machine: Machine
    old: NodeProcess
    new: NodeProcess


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("releases")
    site = released.install(folder)
    with ExitStack() as stack:
        old_machine = released.machine(folder / "old", site)
        stack.callback(old_machine.close)
        new_machine = Machine(folder / "new")
        stack.callback(new_machine.close)
        [old] = old_machine.start_nodes("otto", cwd=folder / "old")
        [new] = new_machine.start_nodes(
            "nina", arguments=["--peer", old.address], cwd=folder / "new"
        )
        yield Both(old_machine=old_machine, new_machine=new_machine, old=old, new=new)


def what_is_said(result: Result) -> object:
    told = result.json
    return told["token_ids"], told["logprobs"]


def ring(*nodes: NodeProcess) -> str:
    return ",".join(node.address for node in nodes)


def test_the_nodes_are_of_two_releases(both: Both) -> None:
    version, _ = released.release()
    listed = both.new_machine.nodes_with("otto", "nina")
    assert (listed["otto"]["version"], listed["nina"]["version"]) == (version, __version__)


def test_a_ring_of_both_releases_says_what_one_says(both: Both) -> None:
    """Whoever leads it, and whoever asks."""
    asked = ("generate", "Once upon a time", *SAID, "--nodes")
    alone = what_is_said(both.new_machine.call(*asked, ring(both.new)))
    cut = (*asked, ring(both.old, both.new)), (*asked, ring(both.new, both.old))
    assert what_is_said(both.new_machine.call(*cut[0])) == alone
    assert what_is_said(both.new_machine.call(*cut[1])) == alone
    assert what_is_said(both.old_machine.run(*cut[1])) == alone
    drafted = both.new_machine.call(*cut[0], "--speculate", "ngram")
    assert what_is_said(drafted) == alone


@pytest.mark.parametrize("asker", ["old", "new"])
def test_each_plans_over_both(both: Both, asker: str) -> None:
    machine = both.old_machine if asker == "old" else both.new_machine
    planned = machine.run("plan", "--json").json
    placed = {stage["node"] for stage in planned["stages"]}
    left_out = {out["node"] for out in planned["left_out"]}
    assert placed | left_out == {both.old.ready["node"], both.new.ready["node"]}


@pytest.mark.parametrize("holder", ["old", "new"])
def test_weights_go_from_one_to_the_other(both: Both, parrots: Parrots, holder: str) -> None:
    machine = both.old_machine if holder == "old" else both.new_machine
    model = parrots.alphabet if holder == "old" else parrots.signs
    (machine.folder / holder).symlink_to(model)
    asked = (
        "generate",
        "a",
        "--max-tokens",
        "4",
        "--model",
        f"/proc/self/cwd/{holder}",
        "--layers",
        "0-2,2-4",
    )
    nodes = (both.new, both.old) if holder == "old" else (both.old, both.new)
    alone = both.new_machine.call(*asked[:4], "--model", str(model), "--nodes", ring(both.new))
    told = both.new_machine.call(*asked, "--nodes", ring(*nodes))
    assert told.stdout == alone.stdout, told.stderr
    other = both.new_machine if holder == "old" else both.old_machine
    assert json.loads(other.run("cache", "ls", "--json").stdout)


@pytest.mark.parametrize("leaves", cases(["old"], ["new"]))
def test_a_running_request_moves_from_one_to_the_other(both: Both, leaves: str) -> None:
    """The head is of either release; the node that is drained is of the other."""
    machine = both.old_machine if leaves == "old" else both.new_machine
    head = both.new if leaves == "old" else both.old
    name = f"drained-{leaves}"
    [leaving] = machine.start_nodes(name, arguments=["--peer", head.address])
    asked = ("generate", "Once upon a time", "--max-tokens", "300", "--ignore-eos")
    alone = both.new_machine.call(*asked, "--nodes", ring(both.new))
    running = both.new_machine.begin_copy(*asked, "--nodes", ring(head, leaving))
    running.stdout.wait_for(alone.stdout[:40])
    drained = both.new_machine.run("drain", name)
    assert drained.code == 0, drained.stderr
    assert running.wait().stdout == alone.stdout
    assert leaving.wait().code == 0
