"""Child processes that take no Ctrl-C and end with this one, and Windows' limits of a process.

Elsewhere a child sees by a closed pipe that this process has ended, and setrlimit limits it.
Windows has job objects for both: what is in one ends when its last handle is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
import subprocess
import sys
from functools import cache
from typing import Any, Final

from shardnet.windows import Handle, checked, library

OWN_SESSION: Final[dict[str, Any]] = {
    "start_new_session": True,
    "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
}
"""Arguments that begin a process which Ctrl-C in this terminal is not for."""
OUT_OF_TIME: Final = 1816
"""Exit code (ERROR_NOT_ENOUGH_QUOTA) of a process that Windows ends for its processor time."""

_LIMITS: Final = struct.Struct("=qqI4xQQI4xQII6Q4Q")
"""JOBOBJECT_EXTENDED_LIMIT_INFORMATION of 64 bits."""
_EXTENDED_LIMITS: Final = 9
_PROCESS_TIME, _PROCESS_MEMORY, _NO_CRASH_DIALOG, _KILL_ON_CLOSE = 0x2, 0x100, 0x400, 0x2000
_MAY_ASSIGN: Final = 0x0100 | 0x0001  # PROCESS_SET_QUOTA and PROCESS_TERMINATE
_MEMORY_COUNTERS: Final = struct.Struct("=II9Q")
_COMMITTED: Final = 8  # PagefileUsage


def end_with_this_process(pid: int) -> None:
    """Have a child end when this process does, however it ends: on Windows, where no pipe says so.

    Does nothing if that cannot be had.
    """
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            system = library("kernel32")
            child = checked(system.OpenProcess(_MAY_ASSIGN, 0, pid))
            try:
                checked(system.AssignProcessToJobObject(_children(), child))
            finally:
                system.CloseHandle(child)


def limit_this_process(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process to further `cpu_s` and `memory_bytes` on Windows, if that can be had.

    The system ends it with OUT_OF_TIME; memory beyond the limit is not given.
    """
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            system = library("kernel32")
            counters = ctypes.create_string_buffer(_MEMORY_COUNTERS.size)
            own = system.GetCurrentProcess()
            checked(system.K32GetProcessMemoryInfo(own, counters, len(counters)))
            used_bytes = _MEMORY_COUNTERS.unpack(counters.raw)[_COMMITTED]
            _set_limits(
                _this_process(),
                _PROCESS_TIME | _PROCESS_MEMORY | _NO_CRASH_DIALOG,
                cpu_s=math.ceil(os.times().user + cpu_s),
                memory_bytes=used_bytes + memory_bytes,
            )


@cache
def _children() -> Handle:
    """Return the job whose processes end when this process, which alone has its handle, does."""
    job: Handle = checked(library("kernel32").CreateJobObjectW(None, None))
    _set_limits(job, _KILL_ON_CLOSE)
    return job


@cache
def _this_process() -> Handle:
    """Return the job of this process."""
    system = library("kernel32")
    job: Handle = checked(system.CreateJobObjectW(None, None))
    checked(system.AssignProcessToJobObject(job, system.GetCurrentProcess()))
    return job


def _set_limits(job: Handle, flags: int, cpu_s: int = 0, memory_bytes: int = 0) -> None:
    limits = _LIMITS.pack(
        *(cpu_s * 10_000_000, 0, flags, 0, 0, 0, 0, 0, 0), *[0] * 6, *(memory_bytes, 0, 0, 0)
    )
    system = library("kernel32")
    checked(system.SetInformationJobObject(job, _EXTENDED_LIMITS, limits, len(limits)))
