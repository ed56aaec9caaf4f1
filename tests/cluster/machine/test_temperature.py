"""How warm a device is: which sensor counts, and that nobody waits for one."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from shardnet.cluster.machine import temperature
from shardnet.cluster.machine.temperature import (
    FRESH_S,
    Thermometer,
    gpu_temperature,
    gpu_use,
    runs_on_battery,
    warmest,
)


def sensors(**readings: list[float]) -> dict[str, list[SimpleNamespace]]:
    return {
        name: [SimpleNamespace(current=value) for value in values]
        for name, values in readings.items()
    }


def test_the_cpu_counts_and_its_warmest_sensor() -> None:
    assert warmest(sensors(nvme=[70.0], acpitz=[30.0], k10temp=[41.0, 55.0])) == 55.0
    assert warmest(sensors(acpitz=[-273.0, 27.8])) == 27.8
    assert warmest(sensors(nvme=[70.0], coretemp=[0.0])) is None
    assert warmest({}) is None


def test_a_reading_is_not_waited_for_and_counts_for_a_while() -> None:
    now_s, may_answer, answers = 0.0, threading.Event(), [40.0, 50.0]

    def sensor() -> float:
        may_answer.wait(10)
        return answers.pop(0)

    def until_read() -> float | None:
        while thermometer._reading is not None and not thermometer._reading.done():
            thermometer._reading.exception(10)
        return thermometer.read()

    thermometer = Thermometer("cpu", clock=lambda: now_s, sensor=sensor)
    assert thermometer.read() is None
    assert thermometer.read() is None
    may_answer.set()
    assert until_read() == 40.0
    assert until_read() == 40.0
    now_s += FRESH_S
    assert thermometer.read() == 40.0
    assert until_read() == 50.0
    now_s += FRESH_S
    thermometer.read()
    assert until_read() is None  # the sensor fails now


class Nvml:
    """NVIDIA's library with two devices, as ctypes calls it."""

    def __init__(self) -> None:
        self.status = 0
        self.use: dict[int, int] = {}
        """What processes take of a device, in percent."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = {b"GPU-first": 1, b"GPU-second": 2}[uuid]
        return 0

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, degrees: Any) -> int:
        assert sensor == 0
        degrees._obj.value = 30 * device.value
        return self.status

    def nvmlDeviceGetUtilizationRates(self, device: Any, percent: Any) -> int:
        percent._obj[0] = sum(self.use.values())
        return 0

    def nvmlDeviceGetProcessUtilization(
        self, device: Any, samples: Any, count: Any, since: Any
    ) -> int:
        for place, (pid, percent) in enumerate(self.use.items()):
            samples[place].pid, samples[place].sm = pid, percent
        count._obj.value = len(self.use)
        return self.status or (0 if self.use else 6)


def test_nodes_that_share_a_gpu_are_no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device does not tell them apart, one node alone knows that it is not its own."""
    nvml, ours, node, other = Nvml(), os.getpid(), os.getppid(), 1
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="first")
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert gpu_use({ours, node}) == 0.0
    nvml.use = {node: 70}
    assert gpu_use({ours, node}) == 0.0
    assert gpu_use({ours}) == 0.7
    nvml.use[other] = 20
    assert gpu_use({ours, node}) == 0.2
    nvml.use = {2**31 - 1: 40}  # a container has other ids
    assert gpu_use({ours, node}) is None
    assert gpu_use({ours}) == 0.4
    nvml.status = 3
    assert gpu_use({ours, node}) is None


def test_the_gpu_that_torch_computes_on_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=("second", "first")[index]),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert gpu_temperature() == 60.0
    assert gpu_temperature(1) == 30.0
    nvml.status = 3
    assert gpu_temperature() is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_temperature() is None


def test_a_gpu_beside_a_torch_without_cuda_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device nvidia:0` needs no more: neither may end what looks after the memory."""

    def no_cuda(index: int) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert gpu_temperature() is None
    assert gpu_use({os.getpid()}) is None


@pytest.mark.parametrize(("kind", "degrees"), [("cpu", 40.0), ("cuda", 71.0), ("nvidia", 71.0)])
def test_the_device_that_computes_is_read(
    kind: str, degrees: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temperature, "cpu_temperature", lambda: 40.0)
    monkeypatch.setattr(temperature, "gpu_temperature", lambda index: 70.0 + index)
    thermometer = Thermometer(kind, 1)
    thermometer.read()
    assert thermometer._reading is not None
    assert thermometer._reading.result(10) == degrees


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


@pytest.mark.parametrize("plugged", [True, False, None])
def test_psutil_knows_the_battery_elsewhere(
    plugged: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    battery = Mock(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert runs_on_battery() is (plugged is False)
    for told in (Mock(return_value=None), Mock(side_effect=OSError(22, "Invalid function"))):
        monkeypatch.setattr(psutil, "sensors_battery", told, raising=False)
        assert not runs_on_battery()


def test_a_battery_counts_only_where_it_alone_gives_power(tmp_path: Path) -> None:
    assert not runs_on_battery(tmp_path / "missing")
    assert not runs_on_battery(tmp_path)
    mouse = {"type": "Battery", "scope": "Device", "status": "Discharging", "online": "1"}
    supply(tmp_path, "mouse", **mouse)
    assert not runs_on_battery(tmp_path)
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert runs_on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert not runs_on_battery(tmp_path)
    (tmp_path / "AC" / "online").write_text("0\n")
    assert runs_on_battery(tmp_path)
