"""What others do on this machine, and how long they wait for memory: files made for the test."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import psutil
import pytest

from shardnet.cluster.machine import temperature
from shardnet.cluster.machine.temperature import InputWatch, OwnerUse, memory_stalled

FULL = "full avg10=90.00 avg60=1.00 avg300=0.10 total=100\n"


def test_the_worst_of_the_systems_stalls_and_the_groups_counts(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "user" / "node"
    group.mkdir(parents=True)
    system, membership = tmp_path / "memory", tmp_path / "membership"
    membership.write_text("0::/user/node\n")

    def stalled() -> float | None:
        return memory_stalled(system, tmp_path / "cgroup", membership)

    assert stalled() is None
    system.write_text(f"some avg10=2.50 avg60=99.00 avg300=0.10 total=100\n{FULL}")
    assert stalled() == 0.025
    (group / "memory.pressure").write_text(f"some avg10=31.00 avg60=0.00 total=1\n{FULL}")
    assert stalled() == 0.31
    (group / "memory.pressure").write_text("some avg10=much\n\n\nsome avg10=")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "read_text", lambda *_: "no\n\nsome avg10=-1 avg10=nan avg10=250")
        assert stalled() == 1.0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no terminals as files")
def test_a_terminal_that_was_read_is_input_also_where_the_clock_jumps(tmp_path: Path) -> None:
    watch = InputWatch(tmp_path)
    assert watch.look() is None
    (tmp_path / "pts").mkdir()
    for name in ("pts/0", "pts/ptmx", "tty1"):
        (tmp_path / name).touch()
    watch.look()
    assert watch.look() is False
    os.utime(tmp_path / "pts/ptmx", (1, 1))
    assert watch.look() is False
    for moment in (4e9, 5e9, 100.0):
        os.utime(tmp_path / "pts/0", (moment, moment))
        os.utime(tmp_path / "tty1", (90.0, 90.0))
        assert watch.look() is True
        assert watch.look() is False


@pytest.mark.parametrize("session", [0, 1])
def test_windows_tells_of_keys_at_a_desktop_only(
    session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter((100, 100, 350))

    def in_session(pid: int, found: Any) -> int:
        found._obj.value = session
        return 1

    def last_input(found: Any) -> int:
        assert found._obj.size == 8
        found._obj.ticks = next(ticks)
        return 1

    windows = Mock()
    windows.kernel32.ProcessIdToSessionId = in_session
    windows.user32.GetLastInputInfo = last_input
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(temperature, "library", partial(getattr, windows))
    watch = InputWatch()
    expected = [False, False, True] if session else [None] * 3
    assert [watch.look() for _ in range(3)] == expected


def test_a_system_that_tells_no_times_costs_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", Mock(side_effect=OSError(22, "Invalid function")))
    assert OwnerUse(lambda: [1], has_input=lambda: None).look().other_cores is None


def test_the_work_of_shardnets_nodes_is_no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, now = [100.0], {7: 50.0, 9: 0.0}, [10.0]

    class Times:
        def __init__(self, user: float) -> None:
            self.user, self.system, self.idle = user, 0.0, 0.0

    class Process:
        def __init__(self, pid: int) -> None:
            if pid not in own:
                raise psutil.NoSuchProcess(pid)
            self.pid = pid

        def nice(self) -> int:
            return 10 if self.pid == 9 else 0

        def cpu_times(self) -> Times:
            return Times(own[self.pid])

        def children(self, recursive: bool) -> list[Process]:
            """The first node has a helper, which decodes a picture."""
            assert recursive
            return [Process(70)] if self.pid == 7 and 70 in own else []

    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(busy[0]))
    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    use = OwnerUse(lambda: [7, 8, 9], lambda: 0.5, has_input=lambda: None)
    first = use.look()
    assert (first.other_cores, first.gpu, first.has_input) == (None, 0.5, None)
    now[0], busy[0], own[7], own[8] = 12.0, 107.0, 53.0, 400.0  # another node has begun
    own[9] = 2.0  # at low priority: it is not among what is busy
    assert use.look().other_cores == 2.0
    now[0], busy[0], own[7], own[8] = 14.0, 107.0, 53.1, 400.0
    own[70] = 0.0
    assert use.look().other_cores == 0.0
    now[0], busy[0], own[70] = 16.0, 110.0, 2.0
    assert use.look().other_cores == 0.5


def test_counters_that_fail_tell_nothing_of_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use = OwnerUse(lambda: [os.getpid()], has_input=lambda: None)
    use.look()

    def fail(*_: object) -> NoReturn:
        raise OSError(22, "Invalid function")

    monkeypatch.setattr(psutil, "cpu_times", fail)
    monkeypatch.setattr(psutil.Process, "cpu_times", fail)
    assert use.look().other_cores is None
