"""Asks Linux to keep processors out of their deep sleeps while steps come (/dev/cpu_dma_latency).

Knows one file. Whoever may not open it, as most users may not, changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/cpu_dma_latency")
MOST_US: Final = 20
"""What a processor may take to wake up: a light sleep, which saves most of the power."""
HOLD_S: Final = 1.0
"""It sleeps as it likes when no step has come for so long."""


class CpuLatency:
    """Holds the device open from a step on until none has come for HOLD_S."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._descriptor = -1
        self._may_open = True
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is open now."""
        return self._descriptor >= 0

    def hold(self) -> None:
        """Note that a step has come. On the loop."""
        self._last_s = time.monotonic()
        if self._descriptor >= 0 or not self._may_open:
            return
        try:
            self._descriptor = os.open(self._device, os.O_WRONLY)
            os.write(self._descriptor, struct.pack("=i", MOST_US))
        except OSError:
            self._may_open = False
            self.close()
        else:
            self._watch(HOLD_S)

    def close(self) -> None:
        """Let go of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _watch(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        left_s = self._last_s + HOLD_S - time.monotonic()
        if left_s > 0:
            self._watch(left_s)
        else:
            self.close()
