"""`shardnet node`: its entry in the register of this machine, and what it warns of; `serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shardnet.cluster.machine import profile
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.transport.loop import run
from shardnet_cli.commands import node as command


def test_commands_find_a_node_wherever_its_address_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after somebody has emptied the folder, as systems do with temporary files."""
    monkeypatch.setattr(command, "REGISTER_S", 0.0)
    register = LocalNodes(tmp_path)
    node: Any = SimpleNamespace(node="a", address="10.0.0.1:7433")
    looks = asyncio.Event()
    keep = register.keep

    def note(*arguments: Any) -> Any:
        looks.set()
        return keep(*arguments)

    async def main() -> None:
        async with command._registered(register, node, "anna"):
            for address in ("10.0.0.1:7433", "10.0.0.9:7433"):
                node.address = address
                (tmp_path / "a.json").unlink()
                for _ in range(2):  # the first look may have begun before that
                    looks.clear()
                    await looks.wait()
                assert [entry.address for entry in register.list()] == [address]
        assert register.list() == []

    monkeypatch.setattr(register, "keep", note)
    asyncio.run(main())


def test_more_memory_than_the_container_has_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "container_limit_bytes", lambda: 2**30)
    device = Device(kind="cpu", description="cpu", dtypes=())
    command._warn_of_memory(MemoryBudget(device=device, asked_bytes=2**29))
    assert capsys.readouterr().err == ""
    command._warn_of_memory(MemoryBudget(device=device, asked_bytes=2**36))
    said = capsys.readouterr().err
    assert "--memory 64.00 GiB is more than this container may use" in said
    assert "takes 1.00 GiB" in said


def test_a_server_that_is_still_starting_ends_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def open_target(wanted: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(5):
            await asyncio.Event().wait()
        yield

    module = import_module("shardnet_cli.commands.serve")
    monkeypatch.setattr(module, "open_target", open_target)
    monkeypatch.setattr(module, "replace", Mock())
    asked: Any = Mock()
    with pytest.raises(KeyboardInterrupt):
        run(module.serve.__wrapped__(http=asked, ring=asked, access=asked))
