"""What is wrong with NVIDIA's GPUs, by their own library: clocks, heat, memory and the driver.

Must not know who asks, nor what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

from shardnet.cluster.machine.temperature import nvidia_gpu
from shardnet.model.drivers.gpu import CUDA, compiler_version

_SM: Final = 1
"""NVML_CLOCK_SM"""
_UNCORRECTED: Final = 1, 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC: since the driver was loaded."""
_BUSY_PERCENT: Final = 50
_SLOW_READINGS: Final = 10
"""So many readings one after the other are no passing moment."""
_POWER_LIMIT: Final = 0x4
_REASONS: Final = {
    0x8: "its hardware slows it down, by heat or by power",
    0x20: "it is too warm",
    0x40: "it is much too warm",
    0x80: "its power supply slows it down",
    _POWER_LIMIT: "its power limit is reached",
}
"""Why clocks are low, as NVML numbers reasons that are not the owner's choice."""


class CardWatch:
    """Looks at one of NVIDIA's GPUs again and again."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._n_slow = 0

    def look(self) -> list[str]:
        """Say what is wrong with it, and what to do; nothing without the library. May block."""
        found: list[str] = []
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            nvml, device, _ = nvidia_gpu(self._index)
            for read in (self._clocks, _errors, _driver):
                with contextlib.suppress(AttributeError):  # of an older library
                    found += [f"GPU {self._index}: {why}" for why in read(nvml, device)]
        return found

    def _clocks(self, nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
        """Say so if they stay low while it computes, or if something holds them down."""
        percent, reasons = (ctypes.c_uint * 2)(), ctypes.c_ulonglong()
        now, most = ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)):
            reasons.value = 0
        whys = [words for bit, words in _REASONS.items() if reasons.value & bit]
        codes = [
            nvml.nvmlDeviceGetUtilizationRates(device, percent),
            nvml.nvmlDeviceGetClockInfo(device, _SM, ctypes.byref(now)),
            nvml.nvmlDeviceGetMaxClockInfo(device, _SM, ctypes.byref(most)),
        ]
        if not any(codes) and percent[0] >= _BUSY_PERCENT:  # what rests is slow for good reason
            self._n_slow = self._n_slow + 1 if 3 * now.value < 2 * most.value else 0
        if self._n_slow >= _SLOW_READINGS:
            why = " and ".join(whys) or "nothing says why"
            return [
                f"it computes at {now.value} of {most.value} MHz: {why}; see its power supply, "
                "cooling and power limit (nvidia-smi -q -d PERFORMANCE), or switch the machine off "
                "and pull its plug for a minute"
            ]
        if reasons.value & sum(_REASONS) & ~_POWER_LIMIT:
            return [f"{' and '.join(whys)}; clean its fans, and see its cables and its case"]
        return []


def _errors(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
    """Say so if its memory has lost bits since the driver was loaded."""
    count = ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetTotalEccErrors(device, *_UNCORRECTED, ctypes.byref(count)) or not count:
        return []
    what = f"{count.value} errors of its memory were not corrected: what it computes may be wrong"
    return [f"{what}; restart the machine, and replace the card if they come again"]


def _driver(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
    """Say so if the driver is older than what compiles the kernel text."""
    version, (major, minor) = ctypes.c_int(), compiler_version(CUDA)
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    own = version.value // 1000
    if not version.value or own >= major:
        return []
    what = f"its driver knows CUDA {own}.{version.value % 1000 // 10} and may not load what NVRTC "
    remedy = f"update the driver, or pip install nvidia-cuda-nvrtc-cu{own}"
    return [f"{what}{major}.{minor} compiles; {remedy}"]
