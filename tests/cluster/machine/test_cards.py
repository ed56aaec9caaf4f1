"""What NVIDIA's library says of a GPU that is wrong: as doctor tells it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.recorded_gpu import recorder

from shardnet.cluster.machine import cards
from shardnet.cluster.machine.cards import CardWatch
from shardnet.cluster.machine.temperature import gpu_temperature
from shardnet.model.drivers import gpu

UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


class _Nvml:
    """NVIDIA's library, with one card that is well."""

    def __init__(self) -> None:
        self.percent, self.mhz, self.most_mhz, self.reasons, self.n_errors = 99, 1900, 2000, 0, 0
        self.cuda = 13_000
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:
        self.asked.append(uuid)
        return int(uuid != f"GPU-{UUID}".encode())

    def nvmlDeviceGetUtilizationRates(self, device: object, percent: Any) -> int:
        percent[0] = self.percent
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: object, reasons: Any) -> int:
        reasons._obj.value = self.reasons
        return 0

    def nvmlDeviceGetClockInfo(self, device: object, clock: int, mhz: Any) -> int:
        mhz._obj.value = self.mhz
        return 0

    def nvmlDeviceGetMaxClockInfo(self, device: object, clock: int, mhz: Any) -> int:
        mhz._obj.value = self.most_mhz
        return 0

    def nvmlDeviceGetTotalEccErrors(
        self, device: object, kind: int, counter: int, count: Any
    ) -> int:
        count._obj.value = self.n_errors if (kind, counter) == (1, 0) else 1000
        return 3 if self.n_errors < 0 else 0  # not supported

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = self.cuda
        return 0

    def nvmlDeviceGetTemperature(self, device: object, sensor: int, degrees: Any) -> int:
        degrees._obj.value = 61
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> _Nvml:
    library = _Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID)
    )
    monkeypatch.setattr(cards, "compiler_version", lambda maker: (13, 0))
    return library


def test_a_card_that_is_well_has_nothing(nvml: _Nvml) -> None:
    nvml.n_errors = -1
    nvml.reasons = 0x1 | 0x4  # it rests, and at its power limit
    watch = CardWatch(0)
    assert [watch.look() for _ in range(20)] == [[]] * 20


def test_clocks_that_stay_low_while_it_computes_are_told(nvml: _Nvml) -> None:
    watch = CardWatch(0)
    nvml.mhz = 800
    for _ in range(9):
        assert not watch.look()
    nvml.percent = 10  # it rests: that tells nothing
    assert not watch.look()
    nvml.percent = 90
    [found] = watch.look()
    assert found.startswith("GPU 0: it computes at 800 of 2000 MHz: nothing says why; ")
    nvml.reasons = 0x4
    assert "its power limit is reached" in watch.look()[0]
    nvml.mhz = 1800
    assert not watch.look()


@pytest.mark.parametrize(
    ("reason", "words"), [(0x8, "by heat or by power"), (0x20, "too warm"), (0x80, "power supply")]
)
def test_what_slows_a_card_down_is_told_at_once(nvml: _Nvml, reason: int, words: str) -> None:
    nvml.reasons = reason
    [found] = CardWatch(0).look()
    assert words in found


def test_errors_of_memory_and_an_old_driver_are_told(nvml: _Nvml) -> None:
    nvml.n_errors, nvml.cuda = 3, 12_040
    errors, driver = CardWatch(0).look()
    assert errors.startswith("GPU 0: 3 errors of its memory were not corrected")
    assert "CUDA 12.4" in driver
    assert "NVRTC 13.0" in driver
    assert "nvidia-cuda-nvrtc-cu12" in driver


def test_without_the_library_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert CardWatch(0).look() == []


def test_a_card_beside_torch_for_cpus_is_found_by_the_driver(
    nvml: _Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cuda(index: int) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.undo()
    driver = recorder()
    monkeypatch.setattr(gpu, "_library", lambda names: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert gpu_temperature(0) == 61
    assert nvml.asked == [f"GPU-{UUID}".encode()]
    assert gpu_temperature(1) is None
