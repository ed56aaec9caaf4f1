"""`shardnet node` without POSIX, as on Windows, or without the compiled kernels.

What a system lacks is taken away here; that Windows has nothing else amiss is not shown.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import mypy
import pytest

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import find_devices, find_isa
from shardnet.model.kernels import library
from shardnet_cli.commands import node as module
from shardnet_cli.flags.node_options import NodeOptions
from shardnet_cli.flags.options import Access

ROOT = Path(__file__).parents[3]
MODULES = ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty", "uvloop")
"""Modules that Windows lacks."""
MISSING: dict[Any, tuple[str, ...]] = {
    os: (
        *("fchmod", "fork", "geteuid", "getpgrp", "memfd_create", "posix_fadvise"),
        *("posix_fallocate", "sched_getaffinity", "setpriority", "sysconf", "tcgetpgrp", "uname"),
        *("O_DIRECTORY", "O_NONBLOCK", "O_PATH"),
    ),
    signal: ("SIGHUP", "SIGKILL"),
    socket: ("SO_REUSEPORT", "TCP_USER_TIMEOUT"),
}
"""What it lacks of others, but for what shardnet/permissions.py takes on this system."""


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
    monkeypatch.setattr(module, "_at_console_end", lambda act: None)
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
        options = NodeOptions(
            port=0,
            name="desk",
            device="cpu",
            memory="1GiB",
            threads=1,
            no_mdns=True,
            no_spin=True,
        )
        node = module._run(
            options,
            Access(insecure=True),
            None,
            idle_unload_s=None,
            as_json=False,
            until_stdin_closes=how != "Ctrl-C",
        )
        with reading, writing, asyncio.Runner(loop_factory=loop) as runner:
            runner.run(node)
        assert any("node desk ready on 127.0.0.1:" in line for line in said)
        assert said[-1] == "node stopped"
        assert LocalNodes(tmp_path / "RUNTIME").list() == []
        return said

    return run


@pytest.mark.parametrize("how", ["Ctrl-C", "end of stdin"])
def test_a_node_starts_and_leaves_without_posix(windows: None, how: str, run_node: Run) -> None:
    """Ctrl-C is as clean as elsewhere, and so is the end of a node of `--local`."""
    run_node(how, WindowsLoop)


def test_a_node_without_compiled_kernels_says_so(
    run_node: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_open", lambda: None)
    monkeypatch.delenv("SHARDNET_ISA", raising=False)
    [line] = [line for line in run_node("end of stdin", asyncio.new_event_loop) if "kernel" in line]
    assert line.startswith("warning: no compiled kernels here: quantised weights are computed many")
    assert "install a C compiler and then shardnet again, or install it from a wheel" in line
    assert find_isa({}) == kernels.NONE
    assert find_isa({"SHARDNET_ISA": "off"}) == kernels.OFF


@pytest.mark.parametrize(
    ("kind", "said"),
    [(0, []), (1, ["leave"]), *((kind, ["leave", "wait 5 s"]) for kind in (2, 5, 6))],
    ids=["Ctrl-C", "Ctrl-Break", "closed", "log-off", "shutdown"],
)
def test_a_console_that_is_closed_ends_the_node(
    kind: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is left to Python; where a console ends Windows waits until the handler returns."""
    did: list[str] = []
    handlers: list[Callable[[int], int]] = []

    class Kernel32:
        def SetConsoleCtrlHandler(self, handler: Callable[[int], int], add: int) -> int:
            handlers.append(handler)
            return add

    monkeypatch.setattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE, raising=False)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: Kernel32(), raising=False)
    monkeypatch.setattr(module.time, "sleep", lambda s: did.append(f"wait {s:g} s"))
    monkeypatch.setattr(module, "_CONSOLE_HANDLERS", [])
    module._at_console_end(lambda: did.append("leave"))
    assert handlers[0](kind) == int(bool(said))
    assert did == said
    assert handlers == module._CONSOLE_HANDLERS


def test_no_module_needs_posix_to_be_imported() -> None:
    first = re.compile(rf"^(?:import|from) ({'|'.join(MODULES)})\b", re.M)
    needing = {
        path.name: first.findall(path.read_text(encoding="utf-8"))
        for package in ("shardnet", "cli")
        for path in (ROOT / package).rglob("*.py")
    }
    assert len(needing) > 100
    assert not {name: found for name, found in needing.items() if found}


GUARDED = {
    "alertness.py:_TimerDescriptor": "kernel_alarm makes it on Linux",
}
"""Where a name that Windows lacks is used without a word about the system, and why it may be."""


def test_what_windows_lacks_is_used_where_the_system_is_asked() -> None:
    """By the stubs that mypy reads: a function that uses such a name says what has it."""
    lacks = {f"{name}.{one}" for name in ("os", "signal", "socket", "time") for one in absent(name)}
    assert {"os.getuid", "signal.SIGKILL", "socket.AF_UNIX", "os.O_CLOEXEC"} <= lacks
    assert not lacks & {"os.getpid", "signal.SIGINT", "socket.AF_INET", "os.O_BINARY"}
    pattern = re.compile(r"\b(?:os|signal|socket|time)\.\w+")
    found = set()
    for package in ("shardnet", "cli"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if not lacks.isdisjoint(pattern.findall(source)):
                found |= {f"{path.name}:{name}" for name in careless(source, pattern, lacks)}
    assert found == set(GUARDED)


def careless(source: str, pattern: re.Pattern[str], lacks: set[str]) -> Iterator[str]:
    """The functions and classes of a module that use such a name and ask nothing."""
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in parts:
            text = "".join(lines[part.lineno - 1 : part.end_lineno])
            is_asking = re.search(r"\bsys\.platform\b|\b(has|get)attr\(", text)
            if not is_asking and not lacks.isdisjoint(pattern.findall(text)):
                named = node if getattr(part, "name", "_").startswith("__") else part
                yield str(getattr(named, "name", f"line {part.lineno}"))


def absent(module: str) -> set[str]:
    """The names of a module of the standard library that it has on other systems only."""
    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    [stub] = [*stubs.glob(f"{module}.pyi"), *stubs.glob(f"{module}/__init__.pyi")]
    seen: dict[bool, set[str]] = {True: set(), False: set()}

    def read(body: list[ast.stmt], on_windows: bool) -> None:
        for node in body:
            match node:
                case ast.If(test=test, body=then, orelse=otherwise):
                    asked = ast.unparse(test)
                    is_other = ("'win32'" in asked and "!=" in asked) or "== 'linux'" in asked
                    read(then, on_windows and not is_other and "== 'darwin'" not in asked)
                    read(otherwise, on_windows and asked != "sys.platform == 'win32'")
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    seen[on_windows].add(name)
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)])
                ):
                    seen[on_windows].add(name)
                case ast.ImportFrom(names=names):
                    seen[on_windows] |= {each.asname or each.name for each in names}

    read(ast.parse(stub.read_text(encoding="utf-8")).body, True)
    return seen[False] - seen[True]
