"""What a node gives back to its machine, and when it takes part again. Pure.

Knows how short memory is, whether its owner uses the machine, and what the node held. Must not know
time, nor how anything is given back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.pressure.memory_strain import MemoryLook, MemoryStrain, Strain

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
