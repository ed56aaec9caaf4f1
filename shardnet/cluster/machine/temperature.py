"""What goes on at this machine: how warm it is, what others do on it, whether it runs on battery.

What a system does not say is None: on Linux keys are seen in terminals and on consoles only, since
desktops keep theirs to themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import psutil

from shardnet.cluster.machine.cores import MEMBERSHIP, ROOT, group_folders
from shardnet.cluster.machine.device_list import CUDA, NVIDIA
from shardnet.cluster.pressure.policy import OwnerLook
from shardnet.runtime.processors.processor_use import NO_FIGURE, processor_times
from shardnet.threads import DaemonThreads
from shardnet.windows import library

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
    """Reads the temperature of a device of a `kind` of device_list.py, each time on a thread of its
    own: NVIDIA's GPU number `index`, or else the CPU.
    """

    def __init__(
        self,
        kind: str,
        index: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sensor: Callable[[], float | None] | None = None,
    ) -> None:
        is_gpu = kind in (CUDA, NVIDIA)
        self._sensor = sensor or (partial(gpu_temperature, index) if is_gpu else cpu_temperature)
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


def gpu_temperature(index: int = 0) -> float | None:
    """Read the temperature of one of torch's CUDA devices, None without NVIDIA's library."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        nvml, device, _ = nvidia_gpu(index)
        degrees = ctypes.c_uint()
        if nvml.nvmlDeviceGetTemperature(device, _NVML_GPU, ctypes.byref(degrees)) == 0:
            return float(degrees.value)
    return None


def gpu_use(ours: Collection[int], index: int = 0) -> float | None:
    """Read the share of the last moments in which one of torch's CUDA devices computed, 0 to 1.

    For other processes than `ours`. None as `gpu_temperature`, and where the device does not say
    who uses it while several of ours may.
    """
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        nvml, device, _ = nvidia_gpu(index)
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


def nvidia_gpu(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p, str]:
    """Return NVIDIA's library, its handle of torch's CUDA device `index`, and its UUID.

    torch and that library may number devices differently: they are matched by their UUID. Raises
    RuntimeError where there is none.
    """
    import torch

    from shardnet.model.drivers.gpu import nvidia_uuid

    nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except AssertionError:  # torch for CPUs alone, beside the kernel text
        uuid = nvidia_uuid(index)
    device = ctypes.c_void_p()
    if (
        nvml.nvmlInit_v2() != 0
        or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != 0
    ):
        raise RuntimeError("the library knows no such device")
    return nvml, device, uuid


def runs_on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Return whether a battery of the machine discharges and nothing else gives power."""
    if sys.platform != "linux":
        ask = getattr(psutil, "sensors_battery", lambda: None)
        battery = None
        with contextlib.suppress(*NO_FIGURE):
            battery = ask()  # None without one
        return battery is not None and battery.power_plugged is False
    try:
        # Those of a mouse or a headset, which are online as well, say nothing of the machine.
        found = [each for each in supplies.iterdir() if read_word(each / "scope") != "Device"]
    except OSError:
        return False
    if any(read_word(each / "online") == "1" for each in found):
        return False
    return any(
        read_word(each / "type") == "Battery" and read_word(each / "status") == "Discharging"
        for each in found
    )


def read_word(path: Path) -> str:
    """Read what one file of /sys says, "" where it says nothing."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


TERMINALS: Final = ("pts/[0-9]*", "tty[0-9]*")


SYSTEM: Final = Path("/proc/pressure/memory")


class OwnerUse:
    """Looks at this machine again and again; each look tells what was done since the last one.

    `own_processes` lists the processes of shardnet's nodes here, whose work is no other program's,
    nor is that of their helpers.
    `gpu` returns the share of the GPU's time that is in use, None where that cannot be known.
    """

    def __init__(
        self,
        own_processes: Callable[[], Iterable[int]],
        gpu: Callable[[], float | None] = lambda: None,
        *,
        has_input: Callable[[], bool | None] | None = None,
    ) -> None:
        self._own_processes = own_processes
        self._gpu = gpu
        self._has_input = has_input or InputWatch().look
        self._at_s = 0.0
        self._busy_s = 0.0
        self._own_s: dict[int, float] = {}

    def look(self) -> OwnerLook:
        """Look. May take some milliseconds."""
        return OwnerLook(
            n_cores=psutil.cpu_count() or 1,
            other_cores=self._other_cores(),
            has_input=self._has_input(),
            gpu=self._gpu(),
        )

    def _other_cores(self) -> float | None:
        """Return how many processors other programs took, those of low priority aside."""
        at_s, (busy_s, _) = time.monotonic(), processor_times()
        own = {each for pid in self._own_processes() for each in _with_helpers(pid)}
        own_s = {pid: took_s for pid in own if (took_s := _took_s(pid)) >= 0}
        before, before_s = self._own_s, self._busy_s
        ours_s = sum(took_s - before.get(pid, took_s) for pid, took_s in own_s.items())
        span_s = at_s - self._at_s if self._at_s else 0.0
        self._at_s, self._busy_s, self._own_s = at_s, busy_s, own_s
        others_s = busy_s - before_s - ours_s
        return None if span_s <= 0 or math.isnan(others_s) else max(0.0, others_s / span_s)


def _with_helpers(pid: int) -> list[int]:
    """Return a process and those that it has begun, as for what strangers wrote (guard/)."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except NO_FIGURE:
        return [pid]


def _took_s(pid: int) -> float:
    """Return the processor time of a process in seconds, negative if it is not to be counted.

    That is where it has ended, or runs at low priority: then the system's busy time lacks it too.
    """
    try:
        process = psutil.Process(pid)
        if os.name == "posix" and process.nice() > 0:
            return -1.0
        times = process.cpu_times()
    except NO_FIGURE:
        return -1.0
    return float(times.user + times.system)


class InputWatch:
    """Tells whether a key or the mouse was used since the last look, None where nobody says."""

    def __init__(self, devices: Path = Path("/dev")) -> None:
        self._devices = devices
        self._last: int | float | None = None
        self._at_s = time.monotonic()

    def look(self) -> bool | None:
        """Look."""
        if sys.platform == "darwin":
            idle_s, before_s = _macos_idle_s(), self._at_s
            self._at_s = time.monotonic()
            return None if idle_s is None else idle_s < self._at_s - before_s
        last = _windows_input() if sys.platform == "win32" else _terminal_input(self._devices)
        before, self._last = self._last, last
        # Only that it changed counts: clocks jump.
        return None if last is None else before is not None and last != before


def _terminal_input(devices: Path) -> int | None:
    """Return when a key was last read from a terminal or console, in ns of the system's clock."""
    read = []
    for pattern in TERMINALS:
        for terminal in devices.glob(pattern):
            with contextlib.suppress(OSError):
                read.append(os.stat(terminal).st_atime_ns)
    return max(read, default=None)


def _windows_input() -> int | None:
    """Return when a key or the mouse was last used, in ms since the system's start.

    None in a session without a desktop, such as that of services: it hears of no other session's.
    """

    class LastInput(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint), ("ticks", ctypes.c_uint)]

    last = LastInput(ctypes.sizeof(LastInput), 0)
    session = ctypes.c_uint(0)
    if (
        not library("kernel32").ProcessIdToSessionId(os.getpid(), ctypes.byref(session))
        or session.value == 0
        or not library("user32").GetLastInputInfo(ctypes.byref(last))
    ):
        return None
    return int(last.ticks)


def _macos_idle_s() -> float | None:
    """Return the seconds since the last event of any input device."""
    any_source, any_event = 1, 0xFFFFFFFF
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(ctypes.util.find_library("ApplicationServices") or "")
        since = library.CGEventSourceSecondsSinceLastEventType
        since.restype, since.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_uint32]
        return float(since(any_source, any_event))
    return None


def memory_stalled(
    system: Path = SYSTEM, root: Path = ROOT, membership: Path = MEMBERSHIP
) -> float | None:
    """Return the share of the last 10 s in which some program waited for memory, 0 to 1.

    It is that of the system, or of a group that this process is in where that is more. None where
    the kernel does not say.
    """
    files = [system, *(folder / "memory.pressure" for folder in group_folders(root, membership))]
    found = [share for file in files if (share := _some(file)) is not None]
    return max(found, default=None)


def _some(file: Path) -> float | None:
    try:
        lines = file.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        kind, _, fields = line.partition(" ")
        for field in fields.split():
            name, _, value = field.partition("=")
            if (kind, name) == ("some", "avg10") and value.replace(".", "", 1).isdecimal():
                return min(1.0, float(value) / 100)
    return None
