"""What others do on this machine: keys and mouse, other programs on its processors and its GPU.

Knows where each system says so, and how long programs had to wait for memory (Linux only). Must
not judge. What a system does not say is None: on Linux keys
are seen in terminals and on consoles only, since desktops keep theirs to themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from shardnet.cluster.machine.container import MEMBERSHIP, ROOT, group_folders
from shardnet.cluster.pressure.policy import OwnerLook

TERMINALS: Final = ("pts/[0-9]*", "tty[0-9]*")


SYSTEM: Final = Path("/proc/pressure/memory")


class OwnerUse:
    """Looks at this machine again and again; each look tells what was done since the last one.

    `own_processes` lists the processes of shardnet's nodes here, whose work is no other program's.
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
        at_s, times = time.monotonic(), psutil.cpu_times()
        busy_s = times.user + times.system
        own_s = {pid: took_s for pid in self._own_processes() if (took_s := _took_s(pid)) >= 0}
        before, before_s = self._own_s, self._busy_s
        ours_s = sum(took_s - before.get(pid, took_s) for pid, took_s in own_s.items())
        span_s = at_s - self._at_s if self._at_s else 0.0
        self._at_s, self._busy_s, self._own_s = at_s, busy_s, own_s
        return None if span_s <= 0 else max(0.0, (busy_s - before_s - ours_s) / span_s)


def _took_s(pid: int) -> float:
    """Return the processor time of a process in seconds, negative if it is not to be counted.

    That is where it has ended, or runs at low priority: then the system's busy time lacks it too.
    """
    try:
        process = psutil.Process(pid)
        if os.name == "posix" and process.nice() > 0:
            return -1.0
        times = process.cpu_times()
    except psutil.Error:
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
    class LastInput(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint), ("ticks", ctypes.c_uint)]

    last = LastInput(ctypes.sizeof(LastInput), 0)
    windows: Any = getattr(ctypes, "windll", None)
    if windows is None or not windows.user32.GetLastInputInfo(ctypes.byref(last)):
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
