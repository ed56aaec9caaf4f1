"""Choose the ring for a request, by what it has computed lately and by how busy it is. Pure.

Knows prompts as bytes: equal beginnings are equal tokens. Must not know links or rings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SHARED_BYTES: Final = 256
"""A shorter beginning is computed again as fast as it is found: some sixty tokens."""
UNEVEN: Final = 1.5
"""How many times as busy as the least busy ring one may be that has the prompt's beginning."""
MAX_PROMPTS: Final = 256
MAX_PROMPT_BYTES: Final = 4 << 20
"""What is remembered of one ring."""


class RecentPrompts:
    """The prompts that a ring has computed lately: their keys and values may be there yet."""

    def __init__(
        self, *, most_prompts: int = MAX_PROMPTS, most_bytes: int = MAX_PROMPT_BYTES
    ) -> None:
        self._most_prompts = most_prompts
        self._most_bytes = most_bytes
        self._prompts: deque[bytes] = deque()
        self._n_bytes = 0

    def add(self, prompt: bytes) -> None:
        """Remember a prompt, in the place of the beginnings of it; the oldest are forgotten."""
        kept = [known for known in self._prompts if not prompt.startswith(known)]
        self._prompts = deque([*kept, prompt])
        self._n_bytes = sum(map(len, self._prompts))
        while len(self._prompts) > self._most_prompts or self._n_bytes > self._most_bytes:
            self._n_bytes -= len(self._prompts.popleft())

    def shared_bytes(self, prompt: bytes) -> int:
        """Return how much of the prompt's beginning is the longest among those remembered."""
        return max((_shared(prompt, known) for known in self._prompts), default=0)

    def clear(self) -> None:
        """Forget all: the ring was lost."""
        self._prompts.clear()
        self._n_bytes = 0


def _shared(one: bytes, other: bytes) -> int:
    """Return the length of the longest beginning that both have."""
    lengths = range(1, min(len(one), len(other)) + 1)  # a memoryview compares item by item
    return bisect_left(lengths, True, key=lambda n: not other.startswith(one[:n]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingView:
    """What counts of a ring that takes requests. `tok_s` is what was predicted of it, or 1.

    It has `n_requests`, and room for one more if `has_room`. `shared_bytes` of the prompt's
    beginning are there.
    """

    tok_s: float
    n_requests: int
    has_room: bool = True
    shared_bytes: int = 0

    @property
    def load(self) -> float:
        """How long one more request would take, beside those that run."""
        return (self.n_requests + 1) / self.tok_s


def choose(rings: Sequence[RingView]) -> int:
    """Return the place of the ring that a request is given to; the first among equals.

    That is the one with most of the prompt's beginning, unless it is too busy or full; where none
    has any, the least busy.
    """
    roomy = [place for place, ring in enumerate(rings) if ring.has_room]
    places = roomy or range(len(rings))
    least = min(rings[place].load for place in places)
    warm = [
        place
        for place in places
        if rings[place].shared_bytes >= SHARED_BYTES
        and rings[place].load <= UNEVEN * least + 1 / rings[place].tok_s
    ]
    if warm:
        return max(warm, key=lambda place: (rings[place].shared_bytes, -rings[place].load))
    return min(places, key=lambda place: rings[place].load)
