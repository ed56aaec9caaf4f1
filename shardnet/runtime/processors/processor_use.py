"""How busy the processors are, by the system's counters, of which every system lacks some."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

DISTURBING_CORES = 0.25
"""Others that use more than this disturb, if they leave less than this idle."""
WAITED_CORES = 0.1
"""Threads here that wait for a processor for more than this share of the time are disturbed."""

_TASKS = Path("/proc/self/task")
NO_FIGURE: Final = (psutil.Error, OSError, RuntimeError)
"""What psutil raises where this system does not tell a figure, or not now."""


def processor_times() -> tuple[float, float]:
    """Return how long all processors were busy and idle (s), NaN where the system does not tell."""
    try:
        times = psutil.cpu_times()
    except NO_FIGURE:
        return math.nan, math.nan
    return times.user + times.system, times.idle + getattr(times, "iowait", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """What the processors have done up to a moment, in seconds.

    `idle_s` is that of all of them, `own_s` what this process computed. `waited_s` is how long its
    threads were ready to run and had no processor, 0 where the system does not tell. Where it does
    not tell what is idle, nothing is disturbed and nothing is quiet.
    """

    at_s: float
    n_cores: int
    idle_s: float
    own_s: float
    waited_s: float

    @classmethod
    def now(cls) -> ProcessorUse:
        """Read the system's counters."""
        return cls(
            at_s=time.perf_counter(),
            n_cores=psutil.cpu_count() or 1,
            idle_s=processor_times()[1],
            own_s=time.process_time(),
            waited_s=sum(_waits_s(_TASKS)),
        )

    def disturbed(self, later: ProcessorUse) -> bool:
        """Say whether other programs took processors from this one until `later`.

        They did where threads here waited for one, or where others used a good part of one and left
        none idle: also memory's bandwidth is shared then. Work of others on idle cores is no
        disturbance.
        """
        took_s = later.at_s - self.at_s
        if took_s <= 0:
            return False
        if later.waited_s - self.waited_s > WAITED_CORES * took_s:
            return True
        return self._others_s(later) > DISTURBING_CORES * took_s > later.idle_s - self.idle_s

    def quiet(self, later: ProcessorUse) -> bool:
        """Say whether other programs hardly used the processors until `later`."""
        return self._others_s(later) <= DISTURBING_CORES * (later.at_s - self.at_s)

    def _others_s(self, later: ProcessorUse) -> float:
        all_s = self.n_cores * (later.at_s - self.at_s)
        return all_s - (later.idle_s - self.idle_s) - (later.own_s - self.own_s)


def _waits_s(tasks: Path) -> Iterator[float]:
    """Give the seconds that each thread of this process has waited for a processor (Linux)."""
    try:
        threads = [*tasks.iterdir()]
    except OSError:  # another system
        return
    for thread in threads:
        with contextlib.suppress(OSError, ValueError):  # it has ended just now
            _, waited_ns, *_ = (thread / "schedstat").read_text().split()
            yield int(waited_ns) / 1e9
