"""`shardnet node` without POSIX, as on Windows, or without the compiled kernels.

What a system lacks is taken away here; that Windows has nothing else amiss is not shown.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import find_devices, find_isa
from shardnet.model.kernels import library
from shardnet_cli.commands import node as module
from shardnet_cli.flags.cluster_access import Access

ROOT = Path(__file__).parents[3]
MODULES = ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty", "uvloop")
MISSING: dict[Any, tuple[str, ...]] = {
    os: (
        *("fchmod", "fork", "geteuid", "getpgrp", "getuid", "memfd_create", "posix_fadvise"),
        *("posix_fallocate", "sched_getaffinity", "setpriority", "sysconf", "tcgetpgrp", "uname"),
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH"),
    ),
    signal: ("SIGHUP", "SIGKILL"),
    socket: ("SO_REUSEPORT", "TCP_USER_TIMEOUT"),
}


class WindowsLoop(asyncio.SelectorEventLoop):
    """An event loop that lacks what those on Windows lack."""

    def _refuse(self, *arguments: object) -> NoReturn:
        raise NotImplementedError

    add_reader = add_writer = remove_reader = remove_writer = _refuse
    add_signal_handler = remove_signal_handler = _refuse


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away what Windows does not have."""
    import shardnet.cluster.discovery.discovery  # other people's modules may need them
    import shardnet.cluster.node.node  # noqa: F401

    find_devices("cpu")
    for owner, names in MISSING.items():
        for name in names:
            monkeypatch.delattr(owner, name, raising=False)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "platform", "win32")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


Run = Callable[[str, Callable[[], asyncio.AbstractEventLoop]], list[str]]


@pytest.fixture
def run_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a node on a loop until it is ready and ends `how`; gives what it says."""

    def run(how: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> list[str]:
        said: list[str] = []
        reading, writing = map(os.fdopen, os.pipe(), "rw")

        def ready(line: object) -> None:
            said.append(str(line))
            if how == "Ctrl-C":
                assert len(LocalNodes(tmp_path / "RUNTIME").list()) == 1
                signal.raise_signal(signal.SIGINT)
            else:
                writing.close()

        for name in ("RUNTIME", "CACHE"):
            monkeypatch.setenv(f"SHARDNET_{name}_DIR", str(tmp_path / name))
        monkeypatch.setattr(sys, "stdin", reading)
        monkeypatch.setattr(module, "write_out", ready)
        monkeypatch.setattr(module, "say", said.append)
        flags = module._Flags(
            host="",
            port=0,
            name="desk",
            device="cpu",
            memory_bytes=1 << 30,
            threads=1,
            cache_limit_bytes=None,
            share_rate=None,
            prefix_cache_bytes=0,
            peers=(),
            no_mdns=True,
            spins=False,
            access=Access(insecure=True),
            http=None,
            as_json=False,
            until_stdin_closes=how != "Ctrl-C",
        )
        with reading, writing, asyncio.Runner(loop_factory=loop) as runner:
            runner.run(module._run(flags))
        assert any("node desk ready on 127.0.0.1:" in line for line in said)
        assert said[-1] == "node stopped"
        assert LocalNodes(tmp_path / "RUNTIME").list() == []
        return said

    return run


@pytest.mark.parametrize("how", ["Ctrl-C", "end of stdin"])
def test_a_node_starts_and_leaves_without_posix(windows: None, how: str, run_node: Run) -> None:
    """Ctrl-C is as clean as elsewhere, and so is the end of a node of `--local`."""
    said = run_node(how, WindowsLoop)
    assert not any("compiled kernels" in line for line in said), "there are none for Windows"


def test_a_node_without_compiled_kernels_says_so(
    run_node: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_open", lambda: None)
    [line] = [line for line in run_node("end of stdin", asyncio.new_event_loop) if "kernel" in line]
    assert line.startswith("warning: no compiled kernels here: quantised weights are computed many")
    assert "install a C compiler and then shardnet again, or install it from a wheel" in line
    assert find_isa({}) == kernels.NONE
    assert find_isa({"SHARDNET_ISA": "off"}) == kernels.OFF


def test_no_module_needs_posix_to_be_imported() -> None:
    first = re.compile(rf"^(?:import|from) ({'|'.join(MODULES)})\b", re.M)
    needing = {
        path.name: first.findall(path.read_text(encoding="utf-8"))
        for package in ("shardnet", "cli")
        for path in (ROOT / package).rglob("*.py")
    }
    assert len(needing) > 100
    assert not {name: found for name, found in needing.items() if found}
