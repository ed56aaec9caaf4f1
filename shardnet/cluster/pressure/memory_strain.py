"""When memory is short on a machine, and how much a node should give back. Pure.

Knows what is available and how long programs wait for memory. Must not know time, the system, or
what a node holds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

SHORT_SHARE: Final = 0.03
SHORT_BYTES: Final = (256 << 20, 2 << 30)
"""Memory is short below this share of all of it, but between these two."""
STALLED: Final = 0.1
"""Programs that wait for memory for more than this share of the time have too little of it."""
STALLED_BELOW: Final = 4
"""So many times what counts as short: stalls where more is available have another cause, such as a
limit of somebody else's container."""
N_SHORT: Final = 3
"""So many looks in a row must find it short: programs that start take memory and give it back."""
RELIEF_S: Final = 10.0
"""How long dropping caches may take to help, before layers are given back."""


class Strain(enum.IntEnum):
    """How much memory should be given back: nothing, what can be made again, or layers too."""

    NONE = 0
    CACHES = 1
    LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLook:
    """The memory that is available on a machine, and all there is.

    `stalled` is the share of the last seconds in which some program waited for memory, None where
    the system does not say.
    """

    available_bytes: int
    total_bytes: int
    stalled: float | None = None

    @property
    def short_bytes(self) -> int:
        """Memory is short below this."""
        least, most = SHORT_BYTES
        return max(least, min(most, int(self.total_bytes * SHORT_SHARE)))

    @property
    def is_short(self) -> bool:
        """Whether little memory is available, whatever there was before."""
        return self.available_bytes < self._limit_bytes

    def is_short_after(self, most_bytes: int) -> bool:
        """Whether little is available, and most of what there was is gone."""
        return self.available_bytes < min(self._limit_bytes, most_bytes // 2)

    @property
    def _limit_bytes(self) -> int:
        is_stalled = self.stalled is not None and self.stalled >= STALLED
        return self.short_bytes * (STALLED_BELOW if is_stalled else 1)


@dataclass(slots=True, kw_only=True)
class MemoryStrain:
    """Judges the looks of one machine, since a model was loaded there.

    Memory is short where little is left and most of what there was is gone: a model that fills a
    machine on purpose, by --memory, is no shortage.
    """

    _most_bytes: int = 0
    _n_short: int = 0
    _since_s: float | None = None
    """When caches were first to be dropped."""

    def look(self, now_s: float, look: MemoryLook) -> Strain:
        """Take the next look, at a moment of any clock that goes on."""
        self._most_bytes = max(self._most_bytes, look.available_bytes)
        self._n_short = self._n_short + 1 if look.is_short_after(self._most_bytes) else 0
        if self._n_short < N_SHORT:
            if not self._n_short:
                self._since_s = None
            return Strain.NONE
        if self._since_s is None:
            self._since_s = now_s
        return Strain.CACHES if now_s - self._since_s < RELIEF_S else Strain.LAYERS
