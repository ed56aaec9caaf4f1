"""What a machine draws: made-up trees of /sys, a library that is none, commands that are real."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardnet.cluster.machine import power
from shardnet.cluster.machine.power import (
    AGAIN_S,
    NO_WATTS,
    PLUG_S,
    READ_S,
    ROOT_ONLY,
    STALE_S,
    Meter,
    PowerWatch,
    Reading,
    read_battery,
    read_gpu,
    read_rapl,
)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return folder


def zone(root: Path, number: str, name: str, n_uj: int, most: int = 262_143_328_850) -> Path:
    files = {"energy_uj": str(n_uj), "max_energy_range_uj": str(most)}
    return write(root / f"intel-rapl:{number}", name=name, **files)


def test_packages_count_and_memory_where_it_is_apart(tmp_path: Path) -> None:
    assert read_rapl(tmp_path / "none") is None
    assert read_rapl(tmp_path) is None
    zone(tmp_path, "0", "package-0", 5_000_000, most=8_000_000)
    zone(tmp_path, "0:0", "core", 4_000_000)
    write(tmp_path / "intel-rapl-mmio:0", name="package-0", energy_uj="7", max_energy_range_uj="9")
    read = read_rapl(tmp_path)
    assert read is not None
    assert read.source == "RAPL: CPU package alone"
    assert read.counters == {"intel-rapl:0": (5.0, 8.0)}
    zone(tmp_path, "1", "package-1-die-0", 1_000_000, most=8_000_000)
    zone(tmp_path, "0:1", "dram", 2_000_000, most=4_000_000)
    read = read_rapl(tmp_path)
    assert read is not None
    assert read.source == "RAPL: CPU package and memory"
    assert sorted(read.counters) == ["intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"]


def test_what_stands_still_at_0_is_no_counter_and_a_platform_stands_for_all(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 5_000_000)
    psys = zone(tmp_path, "1", "psys", 0)
    for text, source in (
        ("0", "RAPL: CPU package alone"),
        ("nonsense", "RAPL: CPU package alone"),
        ("9000000", "RAPL: whole platform"),
    ):
        write(psys, energy_uj=text)
        read = read_rapl(tmp_path)
        assert read is not None
        assert read.source == source
        assert len(read.counters) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_a_counter_for_root_alone_is_refused(tmp_path: Path) -> None:
    (zone(tmp_path, "0", "package-0", 5_000_000) / "energy_uj").chmod(0)
    with pytest.raises(PermissionError):
        read_rapl(tmp_path)


@pytest.mark.parametrize(
    ("files", "watts"),
    [
        ({"status": "Discharging", "power_now": "12500000"}, 12.5),
        ({"status": "Discharging", "current_now": "-1500000", "voltage_now": "12000000"}, 18.0),
        ({"status": "Charging", "power_now": "12500000"}, None),
        ({"status": "Discharging", "power_now": "12500000", "scope": "Device"}, None),
        ({"status": "Discharging"}, None),
    ],
)
def test_a_battery_counts_while_it_discharges(
    tmp_path: Path, files: dict[str, str], watts: float | None
) -> None:
    write(tmp_path / "BAT0", type="Battery", **files)
    write(tmp_path / "AC", type="Mains", online="0")
    read = read_battery(tmp_path)
    assert (read and read.watts) == watts


@pytest.mark.parametrize(("has_counter", "joules"), [(True, 9.0), (False, None)])
def test_a_gpu_is_read_by_its_counter_or_else_by_its_watts(
    has_counter: bool, joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(value: int, code: int) -> Any:
        def call(device: Any, into: Any) -> int:
            into._obj.value = value
            return code

        return call

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, device: 0,
        nvmlDeviceGetTotalEnergyConsumption=answers(9000, 0 if has_counter else 3),
        nvmlDeviceGetPowerUsage=answers(71_500, 0),
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1a2b3c4d-5e6f")
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    read = read_gpu(0)
    assert read is not None
    assert read.source == "NVML: GPU-1a2b3c4d"
    assert read.counters == ({"GPU-1a2b3c4d-5e6f": (9.0, 0.0)} if has_counter else {})
    assert read.watts == (0.0 if has_counter else 71.5)


def counted(*joules: float, most: float = 100.0) -> Reading:
    return Reading("s", counters={str(n): (each, most) for n, each in enumerate(joules)})


def test_counters_that_begin_again_lose_nothing() -> None:
    meter = Meter("s")
    for now_s, reading in enumerate([counted(90, 10), counted(98, 30), counted(7, 60)]):
        meter.take(reading, now_s, None)
    assert meter.told.joules == (8 + 20) + (9 + 30)
    assert meter.told.watts == 39
    meter.take(counted(7, 0, most=0.0), 3, None)  # of one that has no end it is a new beginning
    assert meter.told.joules == 67


def test_watts_last_from_one_reading_to_the_next_but_not_over_a_sleep() -> None:
    meter = Meter("plug")
    for now_s, watts in ((0, 40), (2, 60), (4, 60), (3604, 60)):
        meter.take(Reading("plug", watts), now_s, None)
    assert meter.told.joules == 100 + 120
    assert (meter.told.watts, meter.told.counted_s) == (60, 4)


def test_idle_watts_fall_soon_and_rise_late_and_busy_ones_follow() -> None:
    """What is loaded while no ring runs takes more, and is not what an idle machine takes."""
    meter, now_s = Meter("plug"), 0

    def draw(watts: float, is_busy: bool | None) -> Meter:
        nonlocal now_s
        for _ in range(31):
            meter.take(Reading("plug", watts), now_s, is_busy)
            now_s += 1
        return meter

    assert draw(50, False).told.idle_w == 50
    draw(80, False)
    assert meter.told.idle_w == pytest.approx(51, abs=1)
    assert draw(30, False).told.idle_w == pytest.approx(38, abs=2)
    assert draw(200, None).told.busy_w is None
    assert draw(100, True).told.busy_w == pytest.approx(118, abs=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A watch over made-up folders, whose clock moves by hand."""

    def __init__(self, folder: Path, command: tuple[str, ...] = ()) -> None:
        self.clock, self.log = Clock(), list[str]()
        self.powercap, self.supplies = folder / "powercap", folder / "supplies"
        self.watch = PowerWatch(
            work=lambda: (False, 0),
            cards=[],
            command=command,
            kept=folder / "power.json",
            log=self.log.append,
            clock=self.clock,
            powercap=self.powercap,
            supplies=self.supplies,
        )

    def read(self, worked: tuple[bool, int] | None = (False, 0)) -> float:
        self.clock.now_s += 1
        return self.watch.read(worked)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    """Makes watches, of which each knows the figures of those before."""
    with contextlib.ExitStack() as stack:

        def make(*command: str) -> Bench:
            bench = Bench(tmp_path, command)
            stack.callback(bench.watch.close)
            return bench

        yield make


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()


def test_a_watch_learns_from_what_the_node_does_and_remembers_it(
    bench: Bench, make_bench: MakeBench, tmp_path: Path
) -> None:
    assert bench.read() == AGAIN_S
    assert bench.watch.meters() == []
    n_uj = 1_000_000
    for watts, worked in ((0, (False, 0)), (10, (False, 0)), (20, (True, 3)), (30, (True, 9))):
        n_uj += watts * 1_000_000
        zone(bench.powercap, "0", "package-0", n_uj)
        assert bench.read(worked) == READ_S
    [meter] = bench.watch.meters()
    assert (meter.source, meter.joules, meter.watts) == ("RAPL: CPU package alone", 60, 30)
    assert (meter.idle_w, meter.busy_w) == (10, 30)
    bench.clock.now_s += STALE_S
    assert [meter.watts for meter in bench.watch.meters()] == [None]

    write(bench.supplies / "BAT0", type="Battery", status="Discharging", power_now="15000000")
    bench.read(None)
    assert [meter.source for meter in bench.watch.meters()] == ["battery"]

    later = make_bench()
    write(bench.supplies / "BAT0", status="Full")
    later.read()
    [meter] = later.watch.meters()
    assert (meter.joules, meter.idle_w, meter.busy_w) == (0, 10, 30)
    (tmp_path / "power.json").write_text('{"RAPL: CPU package alone": 7}')
    damaged = make_bench()
    damaged.read()
    assert [meter.idle_w for meter in damaged.watch.meters()] == [None]


def test_what_root_alone_may_read_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(root: Path) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(power, "read_rapl", refused)
    assert bench.read() == AGAIN_S
    assert bench.watch.failure == ROOT_ONLY
    monkeypatch.undo()
    bench.read()
    assert bench.watch.failure == ""


def test_a_plug_counts_in_place_of_all_else(make_bench: MakeBench) -> None:
    plug = make_bench(sys.executable, "-c", "print('43.5 W')")
    zone(plug.powercap, "0", "package-0", 5_000_000)
    assert [plug.read(), plug.read()] == [PLUG_S, PLUG_S]
    [meter] = plug.watch.meters()
    assert (meter.source, meter.watts, meter.joules) == ("plug", 43.5, 43.5)
    assert plug.log == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('off')", "it printed 'off', and no watts"),
        ("print()", "it printed '', and no watts"),
        ("print('nan')", "it printed 'nan', and no watts"),
        ("print('-3')", "it printed '-3', and no watts"),
        ("print('9' * 9999)", f"it printed '{'9' * 80}', and no watts"),
        ("raise SystemExit(3)", "its exit code is 3"),
    ],
)
def test_a_command_that_prints_no_watts_is_warned_of_once(
    make_bench: MakeBench, program: str, said: str
) -> None:
    plug = make_bench(sys.executable, "-c", program)
    assert [plug.read(), plug.read()] == [AGAIN_S, AGAIN_S]
    assert plug.watch.meters() == []
    assert plug.watch.failure == NO_WATTS
    [line] = plug.log
    assert line.startswith("warning: --power-command: ")
    assert said in line


def test_a_command_that_does_not_end_is_ended(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "PLUG_ANSWER_S", 0.2)
    plug = make_bench(sys.executable, "-c", "import time; time.sleep(60)")
    assert plug.read() == AGAIN_S
    assert "did not answer within 0.2 s" in plug.log[0]
