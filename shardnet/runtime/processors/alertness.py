"""What keeps a node awake while its ring owes it a step.

Who sleeps takes 50 to 100 µs to be back, and its core has fallen into a deeper sleep meanwhile.
When the next step will come is guessed from the last ones: a node sleeps until shortly before.
Where nothing runs nothing is awaited, so nothing spins.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from shardnet.windows import library

DEVICE: Final = Path("/dev/cpu_dma_latency")
MOST_US: Final = 20
"""What a processor may take to wake up: a light sleep, which saves most of the power."""
HOLD_S: Final = 1.0
"""It sleeps as it likes when no step has come for so long."""
TOLD_EVERY_S: Final = 20.0
"""Interval at which Windows is told of work; it sleeps after a minute without at the soonest."""
_ES_SYSTEM_REQUIRED: Final = 1
_POWER_THROTTLING: Final = 4
_EXECUTION_SPEED: Final = 1


def _tell_of_work() -> None:
    """Have Windows count the time until the machine sleeps from now on."""
    library("kernel32").SetThreadExecutionState(_ES_SYSTEM_REQUIRED)


def work_at_full_speed() -> None:
    """Have Windows never run this process slowly to save power, as it may what has no window.

    Where that cannot be set it stays as it is.
    """
    if sys.platform == "win32":
        kernel32, state = library("kernel32"), struct.pack("=3I", 1, _EXECUTION_SPEED, 0)
        own = kernel32.GetCurrentProcess()
        kernel32.SetProcessInformation(own, _POWER_THROTTLING, state, len(state))


class CpuLatency:
    """Holds the device open from a step on until none has come for HOLD_S.

    Meanwhile Windows does not send the machine to sleep, as it does when nobody types.
    """

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._descriptor = -1
        self._may_open = True
        self._last_s = 0.0
        self._told_s = -TOLD_EVERY_S
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is open now."""
        return self._descriptor >= 0

    def hold(self) -> None:
        """Note that a step has come. On the loop."""
        self._last_s = time.monotonic()
        if sys.platform == "win32" and self._last_s >= self._told_s + TOLD_EVERY_S:
            self._told_s = self._last_s
            _tell_of_work()
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


SPIN_NS: Final = 200_000
"""The longest that anything spins at a time."""
REST_FACTOR: Final = 8
"""Whoever has spun rests so many times as long: a ninth of a core at most, for each thread."""
LEAD_NS: Final = 60_000
"""So long before the expected time a node wakes up: waking takes about that."""
SHORT_NS: Final = 5_000_000
"""Who waits less sleeps lightly and finds its caches warm: a spin takes more than it saves."""
REMEMBERED: Final = 8
"""Waits from which the next one is guessed."""

_CLOCK_MONOTONIC: Final = 1


class Waits:
    """The last waits for a step, and from when on the next one is likely to end. Pure."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=REMEMBERED)

    def add(self, took_ns: int) -> None:
        """Note how long the last one took."""
        self._last.append(took_ns)

    @property
    def early_ns(self) -> int | None:
        """The second shortest of the last ones, None for too few: few come sooner than that."""
        if len(self._last) < REMEMBERED // 2:
            return None
        return sorted(self._last)[1]


class Alarm(Protocol):
    """Calls a function of the loop at a time, with microseconds' precision."""

    def set(self, after_ns: int) -> None:
        """Call it so long from now, and not at any time set before. From any thread."""

    def close(self) -> None:
        """Never call it any more."""


MakeAlarm = Callable[[Callable[[], None]], Alarm]


class Alertness:
    """Spins on the loop when a step is about to come. `sent` and `arrived` say what happens.

    `stir` wakes the compute thread and has it spin too, where steps are handed over to it.
    """

    def __init__(
        self,
        *,
        stir: Callable[[], None] = lambda: None,
        make_alarm: MakeAlarm | None = None,
        latency: CpuLatency | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stir = stir
        self._clock_ns = clock_ns
        self._latency = CpuLatency() if latency is None else latency
        self._alarm = (make_alarm or kernel_alarm)(self._wake)
        self._waits = Waits()
        self._sent_ns = 0
        self._is_awaited = False
        self.is_spinning = False
        """Whether the loop is being kept awake now."""
        self._hands_over = False
        self._spun_ns = self._rest_until_ns = 0
        self.n_spins = self.n_met = 0
        """How often it spun, and how often the step came meanwhile."""

    def sent(self, *, hands_over: bool) -> None:
        """Note that a step has left, so that another one may come. From any thread.

        `hands_over`: that one will be the compute thread's.
        """
        self._sent_ns = self._clock_ns()
        self._hands_over = hands_over
        self._is_awaited = True
        early_ns = self._waits.early_ns
        if early_ns is not None and early_ns >= SHORT_NS:
            self._alarm.set(early_ns - LEAD_NS)

    def arrived(self) -> None:
        """Note that a step, or the answer to one, has come."""
        self._latency.hold()
        if not self._is_awaited:
            return
        self._is_awaited = False
        self._waits.add(self._clock_ns() - self._sent_ns)
        if self.is_spinning:
            self.n_met += 1

    def close(self) -> None:
        """End it."""
        self._is_awaited = False
        self._alarm.close()
        self._latency.close()
        # What knows this object is let go of: nothing waits for the collector.
        self._alarm, self._stir = _NoAlarm(), lambda: None

    def _wake(self) -> None:
        now = self._clock_ns()
        if not self._is_awaited or self.is_spinning or now < self._rest_until_ns:
            return
        self.n_spins += 1
        self.is_spinning = True
        self._spun_ns = now
        if self._hands_over:
            self._stir()
        self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Have the loop come round again at once: it looks at its sockets and does not sleep."""
        took_ns = self._clock_ns() - self._spun_ns
        if self._is_awaited and took_ns < SPIN_NS:
            self._loop.call_soon(self._spin)
            return
        self.is_spinning = False
        self._rest_until_ns = self._spun_ns + (1 + REST_FACTOR) * min(took_ns, SPIN_NS)


class _TimerDescriptor:
    """An Alarm by Linux's timers: those of the loop count in milliseconds."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._library = ctypes.PyDLL(None)  # its calls are too short to let go of the interpreter
        flags = 0
        if sys.platform != "win32":
            flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = self._library.timerfd_create(_CLOCK_MONOTONIC, flags)
        if self._descriptor < 0:
            raise OSError("no timer")
        self._lock = threading.Lock()
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ring)

    def set(self, after_ns: int) -> None:
        """See Alarm."""
        when = struct.pack("@4q", 0, 0, *divmod(after_ns, 1_000_000_000))
        with self._lock:
            if self._descriptor >= 0:
                self._library.timerfd_settime(self._descriptor, 0, when, None)

    def close(self) -> None:
        """See Alarm."""
        with self._lock:
            if self._descriptor >= 0:
                self._loop.remove_reader(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # it was set anew meanwhile
            return
        self._call()


class _NoAlarm:
    """Never calls: where the system has no such timer, a node sleeps until the step is there."""

    def set(self, after_ns: int) -> None:
        """See Alarm."""

    def close(self) -> None:
        """See Alarm."""


def kernel_alarm(call: Callable[[], None]) -> Alarm:
    """Return the system's alarm, or one that never calls."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        try:
            return _TimerDescriptor(call)
        except (OSError, AttributeError):
            pass
    return _NoAlarm()
