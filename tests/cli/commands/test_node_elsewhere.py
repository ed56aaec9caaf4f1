"""`shardnet node` without the compiled kernels, and what the product may not take for granted.

What it does on Windows is in tests/system/test_wine.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

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
        household=(),
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
    monkeypatch.setattr(module, "library", lambda name: Kernel32())
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
