"""When the owner of a machine uses it. Pure.

Knows the signs: keyboard and mouse, other programs on processors and GPU. Must not know time, nor
how signs are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LEAST_CORES: Final = 0.75
CORE_SHARE: Final = 0.25
"""Other programs use a machine that take so many processors, and this share of them."""
GPU_SHARE: Final = 0.2
N_BUSY: Final = 3
"""So many looks in a row: a program that only starts is no use."""
AWAY_S: Final = 300.0
"""An owner is away when nothing has been seen for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLook:
    """What others do on a machine now: None where it cannot be known.

    `other_cores` of its `n_cores` processors compute for other programs, `gpu` is the share of the
    GPU's time that they take; `has_input` says that a key or the mouse was used since the
    last look.
    """

    n_cores: int
    other_cores: float | None = None
    has_input: bool | None = None
    gpu: float | None = None


@dataclass(slots=True, kw_only=True)
class OwnerWatch:
    """Judges the looks at one machine."""

    _why: str = ""
    _seen_s: float = 0.0
    _n_busy: dict[str, int] = field(default_factory=dict)

    def look(self, now_s: float, look: OwnerLook) -> str:
        """Take the next look; return why the machine is its owner's now, "" if it is not.

        `now_s` is of any clock that goes on.
        """
        for sign in self._signs(look):
            if not self._why:
                self._why = sign
            self._seen_s = now_s
        if now_s - self._seen_s >= AWAY_S:
            self._why = ""
        return self._why

    def _signs(self, look: OwnerLook) -> list[str]:
        """List the signs that its owner uses the machine."""
        cores, least = look.other_cores or 0.0, max(LEAST_CORES, CORE_SHARE * look.n_cores)
        signs = ["its keyboard or mouse is used"] if look.has_input else []
        if self._lasts("processors", cores >= least):
            signs.append(f"other programs use {cores:.1f} of its {look.n_cores} processors")
        if self._lasts("GPU", (look.gpu or 0.0) >= GPU_SHARE):
            signs.append("other programs use its GPU")
        return signs

    def _lasts(self, what: str, is_busy: bool) -> bool:
        self._n_busy[what] = self._n_busy.get(what, 0) + 1 if is_busy else 0
        return self._n_busy[what] >= N_BUSY
