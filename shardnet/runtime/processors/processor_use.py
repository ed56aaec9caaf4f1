"""How busy a machine's processors are, and with whose work, between two moments.

Knows the system's counters. Must not know what is measured meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

DISTURBING_CORES = 0.25
"""Others that use more than this disturb, if they leave less than this idle."""
WAITED_CORES = 0.1
"""Threads here that wait for a processor for more than this share of the time are disturbed."""

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """What the processors have done up to a moment, in seconds.

    `idle_s` is that of all of them, `own_s` what this process computed. `waited_s` is how long its
    threads were ready to run and had no processor, 0 where the system does not tell.
    """

    at_s: float
    n_cores: int
    idle_s: float
    own_s: float
    waited_s: float

    @classmethod
    def now(cls) -> ProcessorUse:
        """Read the system's counters."""
        times = psutil.cpu_times()
        return cls(
            at_s=time.perf_counter(),
            n_cores=psutil.cpu_count() or 1,
            idle_s=times.idle + getattr(times, "iowait", 0.0),
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
        for task in tasks.iterdir():
            _, waited_ns, *_ = (task / "schedstat").read_text().split()
            yield int(waited_ns) / 1e9
    except (OSError, ValueError):  # another system, or a thread that ended just now
        return
