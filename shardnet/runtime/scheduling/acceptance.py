"""How often drafts were right, and how many each drafter made. Pure.

Knows drafters, kinds and depths of drafts. Must not know what follows from it (drafting.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shardnet.wire.messages.diagnostics import MAX_DRAFTERS, Drafted

_FADE: Final = 0.9
"""What a draft that was judged counts after the next one."""
_WEIGHT: Final = 2.0
"""For as many drafts counts what is known of more of them than those of the same kind and depth."""

Key = tuple[str, int, int]
"""Who made a draft, of what kind it is, and about how deep among drafts it is: the bits of that."""


class DraftCounts(Counter[tuple[str, str]]):
    """What drafters have made: how many, by a drafter's name and the field of Drafted."""

    def note(self, names: Sequence[str], n_accepted: int, n_tokens: int) -> None:
        """Add a step with drafts by these drafters, of which the first were right."""
        self.update((name, "n_drafted") for name in names)
        self.update((name, "n_accepted") for name in names[:n_accepted])
        for name in names[:1]:
            self[name, "n_steps"] += 1
            self[name, "n_tokens"] += n_tokens

    def told(self) -> list[Drafted]:
        """Return what each drafter has made, of the last MAX_DRAFTERS."""
        made: dict[str, dict[str, str | int]] = {}
        for (name, what), number in self.items():
            made.setdefault(name, {"drafter": name})[what] = number
        return msgspec.convert([*made.values()][-MAX_DRAFTERS:], list[Drafted])


@dataclass(slots=True)
class Acceptance:
    """How often drafts were right lately, by drafter, by kind, and by depth.

    A kind that is new is taken to be as good as all of its drafter's, a depth as all of its kind's,
    a drafter as `first`.
    """

    first: float
    _judged: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    """Of the beginnings of keys: the drafts that were right, and those that were judged."""

    def likely(self, *key: object) -> float:
        """Return the probability that a draft is right whose key begins so."""
        likely = self.first
        for end in range(1, len(key) + 1):
            n_right, n_judged = self._judged.get(key[:end], (0.0, 0.0))
            likely = (n_right + _WEIGHT * likely) / (n_judged + _WEIGHT)
        return likely

    def all(self, keys: Sequence[Key]) -> list[float]:
        """Return the probability of each of these drafts, if those before it are right."""
        known = {key: self.likely(*key) for key in {*keys}}
        return [known[key] for key in keys]

    def judge(self, key: Key, *, is_right: bool) -> None:
        """Take note of a draft, of which those before it were right."""
        for end in range(1, len(key) + 1):
            n_right, n_judged = self._judged.get(key[:end], (0.0, 0.0))
            self._judged[key[:end]] = (_FADE * n_right + is_right, _FADE * n_judged + 1)
