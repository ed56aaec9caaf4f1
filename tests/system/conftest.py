"""Checkpoints and a set of three nodes that the system tests share.

A test that ends or spoils a node starts its own. Whatever model the shared nodes hold when a test
begins is left over from another test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from nodes import Machine, NodeProcess, Result, open_machine
from parrot import make_parrot

BIG_BYTES = 126_000_000
"""About the size of the `big` checkpoint's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parrots:
    """Folders of checkpoints. `alphabet` says abc…z for ever, `big` the same, slowly and from much
    memory; `signs` says characters of one to four tokens after an `a` and then ends."""

    alphabet: Path
    big: Path
    signs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Three nodes on one machine."""

    machine: Machine
    nodes: list[NodeProcess]

    def addresses(self, *numbers: int) -> str:
        """The nodes of these numbers as --nodes takes them; all without any."""
        return ",".join(self.nodes[number].address for number in numbers or range(3))

    def generate(self, prompt: str, model: Path, *arguments: str) -> Result:
        """Run `shardnet generate` to its end."""
        return self.machine.run("generate", prompt, "--model", str(model), *arguments)


@pytest.fixture(scope="session")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Parrots:
    """The checkpoints, none of which a test may change."""
    folder = tmp_path_factory.mktemp("parrots")
    letters = "abcdefghijklmnopqrstuvwxyz"
    return Parrots(
        alphabet=make_parrot(folder / "alphabet", letters, ends=False),
        big=make_parrot(folder / "big", letters, ends=False, intermediate=1 << 14),
        signs=make_parrot(folder / "signs", "aé€😀 Жz.", ends=True),
    )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine for one test."""
    with open_machine(tmp_path / "machine") as machine:
        yield machine


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three nodes that live as long as the tests."""
    with open_machine(tmp_path_factory.mktemp("trio") / "machine") as machine:
        yield Trio(machine=machine, nodes=machine.start_nodes("anna", "bert", "cleo"))
