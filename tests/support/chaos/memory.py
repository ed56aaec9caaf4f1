"""The resident memory of processes minute by minute, and whether it is flat. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
