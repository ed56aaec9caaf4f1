"""What doctor says of a Windows machine, and how the machine is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from support.cluster.checkup_facts import NO_KEY, facts

from shardnet.cluster.diagnosis.system_findings import windows_findings
from shardnet.cluster.machine import windows_system
from shardnet.cluster.machine.windows_system import (
    Firewall,
    Rule,
    WindowsSystem,
    read_firewall,
    read_windows_system,
)
from shardnet.errors import ConfigurationError

PRIVATE, PUBLIC, ALL = 2, 4, 2**31 - 1
TCP, UDP, ANY = 6, 17, 256
PYTHON = r"C:\Program Files\Python311\python.exe"
OURS = Rule(allows=True, protocol=ANY, ports="*", profiles=PRIVATE)
TCP_ONLY = Rule(allows=True, protocol=TCP, ports="80, 7000-8000,RPC", profiles=ALL)
CANCELLED = [Rule(allows=False, protocol=each, ports="*", profiles=PRIVATE) for each in (TCP, UDP)]


def lines(system: WindowsSystem, **changes: Any) -> list[str]:
    told = replace(facts(), windows=system, **changes)
    return [f"{found.severity.value} {found.line}" for found in windows_findings(told)]


def behind(*rules: Rule, current: int = PRIVATE, on: tuple[int, ...] = (1, 2, 4)) -> WindowsSystem:
    firewall = Firewall(current=current, on=list(on), rules=list(rules), public=[])
    return WindowsSystem(program=PYTHON, firewall=firewall)


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (behind(OURS), ""),
        (behind(), "lets nobody in to TCP port 7433 and UDP port 5353"),
        (behind(on=(PUBLIC,)), ""),
        (behind(TCP_ONLY), "lets nobody in to UDP port 5353"),
        (behind(OURS, current=PRIVATE | PUBLIC), "lets nobody in to TCP port 7433 and UDP"),
        (behind(OURS, *CANCELLED), "a rule of Windows' firewall keeps others from TCP port 7433"),
        (behind(OURS, CANCELLED[1]), "keeps others from UDP port 5353"),
        (WindowsSystem(program=PYTHON), ""),
    ],
)
def test_a_firewall_that_lets_nobody_in_is_named_with_what_opens_it(
    system: WindowsSystem, words: str
) -> None:
    said = lines(system)
    assert len(said) == bool(words)
    assert all(words in line and line.startswith("problem this machine") for line in said)
    assert all(f'action=allow program="{PYTHON}"`' in line for line in said)
    assert all(("delete rule" in line) is ("keeps others" in words) for line in said)


def test_nodes_that_are_not_to_be_reached_need_no_open_port() -> None:
    assert lines(behind(), key=NO_KEY) == []


def test_the_ports_of_the_nodes_here_are_looked_at() -> None:
    assert lines(behind(TCP_ONLY, OURS), ports=(7433, 9000)) == []
    [line] = lines(behind(TCP_ONLY), ports=(7433, 9000))
    assert "to TCP port 9000 and UDP port 5353" in line


def test_public_networks_sleep_and_long_names_are_told() -> None:
    home = Firewall(current=PUBLIC, on=[], rules=[], public=["WLAN 2"])
    system = WindowsSystem(program=PYTHON, firewall=home, sleeps_after_s=1800, has_long_paths=False)
    public, sleep, long = lines(system)
    assert "-InterfaceAlias 'WLAN 2' -NetworkCategory Private" in public
    assert "sleep after 30 min" in sleep
    assert "LongPathsEnabled" in long
    assert all(line.startswith("info") for line in (public, sleep, long))
    assert lines(replace(system, firewall=None, sleeps_after_s=0, has_long_paths=True)) == []


def test_powershell_is_asked_about_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "current": 2,
        "on": [1, 2],
        "rules": [{"allows": False, "protocol": 6, "ports": "*", "profiles": 3}],
        "public": ["Ethernet"],
    }
    answers = [b"\xef\xbb\xbf" + json.dumps(told).encode() + b"\r\n", b"", b"{}", b"error", b"[1]"]
    asked = []

    async def ask(command: list[str], *_: object, **__: object) -> bytes:
        asked.append(base64.b64decode(command[-1]).decode("utf-16-le"))
        assert command[0].endswith(r"\System32\WindowsPowerShell\v1.0\powershell.exe")
        assert command[1:-1] == ["-NoProfile", "-NonInteractive", "-EncodedCommand"]
        return answers.pop(0)

    monkeypatch.setattr(windows_system, "ask", ask)
    found = asyncio.run(read_firewall(r"C:\Jo's\python.exe"))
    assert found is not None
    assert (found.public, found.current) == (["Ethernet"], PRIVATE)
    assert found.rules == [Rule(allows=False, protocol=TCP, ports="*", profiles=3)]
    assert r"-eq 'C:\Jo''s\python.exe'" in asked[0]
    while answers:
        assert asyncio.run(read_firewall("x")) is None
    monkeypatch.setattr(windows_system, "ask", Mock(side_effect=ConfigurationError("x")))
    assert asyncio.run(read_firewall("x")) is None


def test_the_time_until_sleep_is_read_from_the_power_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(_: None, scheme: object, group: bytes, setting: bytes, seconds: Any) -> int:
        assert (len(group), len(setting)) == (16, 16)
        seconds._obj.value = 900
        return 0

    windows = Mock()
    windows.powrprof.PowerGetActiveScheme.return_value = 0
    windows.powrprof.PowerReadACValueIndex = read
    monkeypatch.setattr(windows_system, "library", partial(getattr, windows))
    assert windows_system._sleeps_after_s() == 900
    assert windows.kernel32.LocalFree.called
    windows.powrprof.PowerGetActiveScheme.return_value = 120
    assert windows_system._sleeps_after_s() is None


@pytest.mark.skipif(sys.platform == "win32", reason="it is asked there")
def test_other_systems_are_not_asked() -> None:
    assert asyncio.run(read_windows_system()) is None
