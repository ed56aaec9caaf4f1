"""What a node gives back to its machine, and when it takes part again. Pure.

Knows when memory is short, when the owner uses the machine, and what the node held. Must not know
time, nor how signs are read or anything is given back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

DROP_S: Final = 30.0
"""Caches are dropped once in so long."""
REST_S: Final = 60.0
"""How long a node rests at least for lack of memory; twice as long each time."""
LONGEST_REST_S: Final = 3600.0
MOST_RESTS: Final = 8
"""So many are counted: they reach LONGEST_REST_S before."""
FORGIVEN_S: Final = 4 * 3600.0
"""After so long without such a rest the next one is taken for the first."""
SHORT_OF_MEMORY: Final = "memory is short there"


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


LEAST_CORES: Final = 0.75
CORE_SHARE: Final = 0.25
"""Other programs use a machine that take so many processors, and this share of them."""
GPU_SHARE: Final = 0.2
N_BUSY: Final = 3
"""So many looks in a row: a program that only starts is no use."""
AWAY_S: Final = 300.0
"""An owner is away when nothing has been seen for so long."""


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


class Action(enum.Enum):
    """What to do now: nothing, drop what can be made again, give all layers away, take part."""

    NOTHING = "nothing"
    DROP = "drop caches"
    REST = "rest"
    BACK = "back"


@dataclass(slots=True, kw_only=True)
class PressurePolicy:
    """Decides for one node. `why` is why it rests, "" while it takes part."""

    why: str = ""
    _strain: MemoryStrain = field(default_factory=MemoryStrain)
    _held_bytes: int = 0
    _dropped_s: float | None = None
    _since_s: float = 0.0
    _short_s: float = 0.0
    _n_rests: int = 0
    """How often it has rested for lack of memory lately."""
    _given_bytes: int = 0
    """What the node held when it began to rest."""

    def look(self, now_s: float, memory: MemoryLook | None, owner: str, held_bytes: int) -> Action:
        """Decide by the memory, None where it is not looked at, and what the owner does.

        `owner` says why the machine is its owner's now, "" if it is not. The node holds
        `held_bytes`. `now_s` is of any clock that goes on.
        """
        if self.why:
            return self._resting(now_s, memory, owner, held_bytes)
        if owner:
            return self._rest(now_s, owner, held_bytes)
        if held_bytes != self._held_bytes:  # what was available before, this model may fill
            self._held_bytes, self._strain = held_bytes, MemoryStrain()
        if memory is None or not held_bytes:
            return Action.NOTHING
        strain = self._strain.look(now_s, memory)
        if strain is Strain.LAYERS:
            return self._rest(now_s, SHORT_OF_MEMORY, held_bytes)
        is_due = self._dropped_s is None or now_s - self._dropped_s >= DROP_S
        if strain is Strain.CACHES and is_due:
            self._dropped_s = now_s
            return Action.DROP
        return Action.NOTHING

    def relieved(self) -> None:
        """Note that there was something to free instead of resting."""
        self.why, self._n_rests = "", max(0, self._n_rests - 1)
        self._strain = MemoryStrain()

    def _rest(self, now_s: float, why: str, held_bytes: int) -> Action:
        if why == SHORT_OF_MEMORY:  # those for its owner are no reason to wait longer
            is_forgiven = now_s - self._short_s >= FORGIVEN_S
            self._n_rests = 1 if is_forgiven else min(self._n_rests + 1, MOST_RESTS)
            self._short_s = now_s
        self.why, self._since_s, self._given_bytes = why, now_s, held_bytes
        return Action.REST

    def _resting(
        self, now_s: float, memory: MemoryLook | None, owner: str, held_bytes: int
    ) -> Action:
        """Take part again when nobody needs the machine, and there is memory for as much again."""
        self._given_bytes = max(self._given_bytes, held_bytes)
        if owner or held_bytes:
            return Action.NOTHING
        if self.why == SHORT_OF_MEMORY and memory is not None:
            rest_s = min(LONGEST_REST_S, REST_S * 2.0 ** (self._n_rests - 1))
            needed_bytes = self._given_bytes + 2 * memory.short_bytes
            if now_s - self._since_s < rest_s or memory.available_bytes < needed_bytes:
                return Action.NOTHING
        self.why, self._strain = "", MemoryStrain()
        return Action.BACK
