"""Reads how warm the device is, a GPU's use, and whether the machine runs on its battery.

Knows NVIDIA's library, the system's sensors, and which of them is which device's. Must not wait:
sensors may take a second to answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

import psutil

from shardnet.threads import DaemonThreads

FRESH_S: Final = 2.0
"""A temperature counts for so long."""

_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz")
"""What Linux calls the sensor of a CPU, the best first."""
SAMPLED_S: Final = 2.0
"""What a process took of a GPU longer ago does not count."""
MOST_PROCESSES: Final = 256
_NVML_NOT_FOUND: Final = 6
"""NVML_ERROR_NOT_FOUND"""
_NVML_GPU: Final = 0
"""NVML_TEMPERATURE_GPU"""


POWER_SUPPLIES: Final = Path("/sys/class/power_supply")


class _Reading(Protocol):
    @property
    def current(self) -> float: ...


class Thermometer:
    """Reads the temperature of a device of `kind` cpu or cuda, each time on a thread of its own."""

    def __init__(
        self,
        kind: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sensor: Callable[[], float | None] | None = None,
    ) -> None:
        self._sensor = sensor or (gpu_temperature if kind == "cuda" else cpu_temperature)
        self._clock = clock
        self._reading: Future[float | None] | None = None
        self._latest: float | None = None
        self._read_at_s = -math.inf

    def read(self) -> float | None:
        """Return the last known temperature in degrees Celsius, None if there is none.

        Has it read anew for the next call if it is older than FRESH_S.
        """
        if self._reading is not None and self._reading.done():
            # A driver that fails has no temperature; a sensor may fail with anything.
            failed = self._reading.cancelled() or self._reading.exception() is not None
            self._latest = None if failed else self._reading.result()
            self._reading = None
        if self._reading is None and self._clock() - self._read_at_s >= FRESH_S:
            self._read_at_s = self._clock()
            self._reading = DaemonThreads(1, "shardnet-warmth").submit(self._sensor)
        return self._latest


def cpu_temperature() -> float | None:
    """Read the warmest sensor of the CPU in degrees Celsius, None where the system has none."""
    read = getattr(psutil, "sensors_temperatures", None)  # neither macOS nor Windows has it
    return None if read is None else warmest(read())


def warmest(sensors: Mapping[str, Sequence[_Reading]]) -> float | None:
    """Return the highest plausible temperature of the first sensor that is a CPU's."""
    for name in _CPU_SENSORS:
        found = [one.current for one in sensors.get(name, ()) if 0 < one.current < 150]
        if found:
            return max(found)
    return None


def gpu_temperature() -> float | None:
    """Read the temperature of torch's first CUDA device, None without NVIDIA's library."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        nvml, device = _first_gpu()
        degrees = ctypes.c_uint()
        if nvml.nvmlDeviceGetTemperature(device, _NVML_GPU, ctypes.byref(degrees)) == 0:
            return float(degrees.value)
    return None


def gpu_use(ours: Collection[int]) -> float | None:
    """Read the share of the last moments in which torch's first CUDA device computed, 0 to 1.

    For other processes than `ours`. None as `gpu_temperature`, and where the device does not say
    who uses it while several of ours may.
    """
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        nvml, device = _first_gpu()
        samples = _process_samples(nvml, device)
        if samples is not None:
            taken = sum(int(one.sm) for one in samples if one.pid not in ours)
            return min(1.0, taken / 100)
        percent = (ctypes.c_uint * 2)()  # of the processors, and of the memory
        read = nvml.nvmlDeviceGetUtilizationRates
        if len(ours) <= 1 and read(device, ctypes.byref(percent)) == 0:
            return min(1.0, percent[0] / 100)
    return None


class _ProcessSample(ctypes.Structure):
    """What one process took of the device, in percent, at a moment in microseconds."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("at_us", ctypes.c_ulonglong),
        *((name, ctypes.c_uint) for name in ("sm", "memory", "encoder", "decoder")),
    ]


def _process_samples(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Sequence[_ProcessSample] | None:
    """Return what each process took lately, None where the device does not tell them apart.

    In a container the library names processes by ids of the machine, which ours are not.
    """
    since = ctypes.c_ulonglong(int((time.time() - SAMPLED_S) * 1e6))
    samples = (_ProcessSample * MOST_PROCESSES)()
    count = ctypes.c_uint(MOST_PROCESSES)
    code = nvml.nvmlDeviceGetProcessUtilization(device, samples, ctypes.byref(count), since)
    if code == _NVML_NOT_FOUND:  # nobody used it
        return []
    found = samples[: count.value] if code == 0 else None
    return found if found is None or all(psutil.pid_exists(one.pid) for one in found) else None


def _first_gpu() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return NVIDIA's library and its handle of torch's first CUDA device, or raise RuntimeError.

    torch and that library may number devices differently: they are matched by their UUID.
    """
    import torch

    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    device = ctypes.c_void_p()
    if (
        nvml.nvmlInit_v2() != 0
        or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != 0
    ):
        raise RuntimeError("the library knows no such device")
    return nvml, device


def runs_on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Return whether a battery of the machine discharges and nothing else gives power."""
    try:
        # Those of a mouse or a headset, which are online as well, say nothing of the machine.
        found = [each for each in supplies.iterdir() if _read(each / "scope") != "Device"]
    except OSError:
        return False
    if any(_read(each / "online") == "1" for each in found):
        return False
    return any(
        _read(each / "type") == "Battery" and _read(each / "status") == "Discharging"
        for each in found
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
