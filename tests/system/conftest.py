"""Checkpoints and a set of three nodes that the system tests share.

A test that ends or spoils a node starts its own. Whatever model the shared nodes hold when a test
begins is left over from another test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support.system.nodes import FIGURES_VARIABLE, Command, Crew, Machine, open_machine
from support.system.parrot import Parrots, make_parrots
from support.system.warm_start import is_possible, server

from shardnet.transport.loop import run


@pytest.fixture(scope="session")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Parrots:
    """The checkpoints, none of which a test may change."""
    return make_parrots(tmp_path_factory.mktemp("parrots"))


@pytest.fixture(scope="session", autouse=True)
def _loop_before_all_tests() -> None:
    """Have libuv open the pipe for signals that it keeps as long as the process lives."""
    run(asyncio.sleep(0))


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_children() -> Iterator[None]:
    """Undo an ignored SIGINT, which children would inherit, as from a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _server_of_warm_starts(_interrupts_reach_children: None) -> Iterator[None]:
    """Have the process that nodes are copies of before tests look for what is left behind."""
    with server() if is_possible() else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def _figures_of_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have machines measure only what none has before them, in whichever of pytest's workers."""
    mine = tmp_path_factory.getbasetemp()
    everyones = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    folder = everyones / "figures"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FIGURES_VARIABLE, str(folder))
        yield


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, object]:
    """Note of each test whether it failed."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _failures_leave_no_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a failed test had started and did not come to end: of a passed one it is told."""
    before = set(Command.running)
    yield
    if request.node.stash.get(_failed, False):
        for command in set(Command.running) - before:
            command.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine for one test."""
    with open_machine(tmp_path / "machine") as machine:
        yield machine


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Three nodes that live as long as the tests."""
    with open_machine(tmp_path_factory.mktemp("trio") / "machine") as machine:
        yield Crew(machine=machine, nodes=machine.start_nodes("anna", "bert", "cleo"))
