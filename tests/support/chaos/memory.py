"""What processes hold minute by minute, and whether it is flat. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

EVERY_S = 60.0
SETTLED_S = 600.0
"""Until then pools and caches of a process fill."""
MOST_GROWTH = 0.02


@dataclass(slots=True)
class MemoryBook:
    """Readings (bytes) of processes by name, from when the first one was taken."""

    began_s: float
    readings: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next reading."""
        return now_s >= self.began_s + EVERY_S * len(self.readings)

    def take(self, now_s: float, resident: Mapping[str, int]) -> str:
        """Take a reading, and return it as a line."""
        age_s = now_s - self.began_s
        self.readings.append((age_s, dict(resident)))
        each = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in resident.items())
        return f"resident after {age_s / 60:.0f} min (MiB): {each}"

    def growths(self) -> dict[str, float]:
        """Return by what share each has grown since it was settled, up to the last reading."""
        settled = [resident for age_s, resident in self.readings if age_s >= SETTLED_S]
        if len(settled) < 2:
            return {}
        first, last = settled[0], settled[-1]
        return {name: last[name] / first[name] - 1 for name in first.keys() & last.keys()}

    def wrong(self) -> list[str]:
        """Say who has grown by more than it may."""
        return [
            f"{name} has grown by {100 * growth:.1f} % after {SETTLED_S / 60:.0f} min"
            for name, growth in sorted(self.growths().items())
            if growth > MOST_GROWTH
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one node held `at_s` seconds after the first sample, whichever process it was."""

    at_s: float
    node: str
    resident_bytes: int
    n_descriptors: int
    n_threads: int
    disk_bytes: int


QUANTITIES: dict[str, tuple[Callable[[Sequence[int]], float], float, int]] = {
    "resident_bytes": (max, 0.05, 4 << 20),
    "n_descriptors": (median, 0.0, 8),
    "n_threads": (median, 0.0, 6),
    "disk_bytes": (median, MOST_GROWTH, 1 << 20),
}
"""What has to stay flat: which of its values count, and by which share and how much more they may
vary. Memory rises with a ring's age and falls with the next model, so that its peaks count.
"""


def verdict(samples: Sequence[Sample], settled_s: float = SETTLED_S) -> list[str]:
    """Say what grew on which node: what counts of the last third against that of the first.

    What was sampled before `settled_s` does not count. Empty where all is flat, or too few are
    there to say.
    """
    wrong = []
    for node in sorted({one.node for one in samples}):
        settled = [one for one in samples if one.node == node and one.at_s >= settled_s]
        third = len(settled) // 3
        for what, (of, share, slack) in QUANTITIES.items() if third else ():
            values = [getattr(one, what) for one in settled]
            first, last = of(values[:third]), of(values[-third:])
            if last > first * (1 + share) + slack:
                wrong.append(f"{node}: {what} grew from {first:.0f} to {last:.0f}")
    return wrong
