"""`shardnet node` without the compiled kernels, and what the product may not take for granted.

What it does on Windows is in tests/system/test_wine.py.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mypy
import pytest

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import find_isa
from shardnet.model.kernels import library
from shardnet_cli.commands import node as module
from shardnet_cli.flags.node_options import NodeOptions
from shardnet_cli.flags.options import Access

ROOT = Path(__file__).parents[3]
MODULES = ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty", "uvloop")
"""Modules that Windows lacks."""


def test_a_node_without_compiled_kernels_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs, by asyncio's own loop, and leaves when its standard input ends."""
    monkeypatch.setattr(library, "_open", lambda: None)
    monkeypatch.delenv("SHARDNET_ISA", raising=False)
    said: list[str] = []
    reading, writing = map(os.fdopen, os.pipe(), "rw")

    def ready(line: object) -> None:
        said.append(str(line))
        writing.close()

    for name in ("RUNTIME", "CACHE"):
        monkeypatch.setenv(f"SHARDNET_{name}_DIR", str(tmp_path / name))
    monkeypatch.setattr(sys, "stdin", reading)
    monkeypatch.setattr(module, "write_out", ready)
    monkeypatch.setattr(module, "say", said.append)
    node = module._run(
        NodeOptions(port=0, name="desk", device="cpu", memory="1GiB", threads=1, no_mdns=True),
        Access(insecure=True),
        None,
        idle_unload_s=None,
        as_json=False,
        until_stdin_closes=True,
    )
    with reading, writing, asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(node)
    assert any("node desk ready on 127.0.0.1:" in line for line in said)
    assert said[-1] == "node stopped"
    assert LocalNodes(tmp_path / "RUNTIME").list() == []
    [line] = [line for line in said if "kernel" in line]
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
