"""Weights that go from node to node: one copy of a checkpoint among three machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Machine, NodeProcess
from parrot import Parrots
import contextlib


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, each with a home of its own."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("anna", "bert", "cleo"):
            (tmp_path / name).mkdir()
            machine = Machine(tmp_path / name)
            stack.callback(machine.close)
            made.append(machine)
        yield made


def test_smoke(machines: list[Machine], parrots: Parrots, tmp_path: Path) -> None:
    copy = machines[0].folder / "model"
    copy.symlink_to(parrots.alphabet)
    [anna] = machines[0].start_nodes("anna", cwd=machines[0].folder)
    [bert] = machines[1].start_nodes(
        "bert", arguments=["--peer", anna.address], cwd=machines[1].folder
    )
    [cleo] = machines[2].start_nodes(
        "cleo", arguments=["--peer", anna.address], cwd=machines[2].folder
    )
    nodes = ",".join(n.address for n in (bert, anna, cleo))
    path = "/proc/self/cwd/model"
    result = machines[1].call(
        "generate", "a", "--model", path, "--nodes", nodes, "--max-tokens", "3"
    )
    print(result)
    result = machines[1].call(
        "generate",
        "a",
        "--model",
        path,
        "--nodes",
        nodes,
        "--max-tokens",
        "3",
        "--layers",
        "0-2,2-3,3-4",
    )
    print(result)
    print(machines[1].call("cache", "ls"), machines[2].call("cache", "ls", "--json"))
    print(machines[1].call("cache", "rm", "--all"))
    print(anna.log, bert.log, cleo.log)
    assert 0
