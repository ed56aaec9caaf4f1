"""Guesses of how a sequence goes on, and how many of them pay. Pure.

Knows token ids, acceptance and what rows cost (design decision 5). Must not know
slots, frames or models: whoever verifies the guesses tells how many were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardnet.runtime.scheduling.step_cost import StepCost

MAX_DRAFT_TOKENS = 31
"""With the newest token they fill what a step carries for about the price of one row."""

_PROBE_EVERY = 16
"""A drafter that does not pay is tried again with one token at every so many chances."""


class Guesser(Protocol):
    """Where guesses come from."""

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Begin to guess at most `limit` tokens after `tokens`; return whether that is done."""

    def guess(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow `tokens`, which only grow between calls."""

    def close(self) -> None:
        """Give back what it holds."""


class NgramGuesser:
    """Prompt look-up: what followed the last few tokens when they stood there before.

    After "Prompt Lookup Decoding" (A. Saxena, 2023), with an index that grows with the text: a
    guess costs the same however long the text is.
    """

    def __init__(self, sizes: Sequence[int] = (4, 3, 2)) -> None:
        """Take the lengths of the n-grams to look up, the first that is found counts."""
        self._sizes = tuple(sizes)
        self._next: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Nothing is to be prepared."""
        return True

    def close(self) -> None:
        """Nothing is held."""

    def guess(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See Guesser. Where the text runs into its own end, it goes on with what was guessed."""
        self._index(tokens)
        for size in self._sizes:
            start = self._next.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if start is not None:
                return _continued(tokens, start, limit)
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note what follows each n-gram, the latest place counts; the last one has no follower."""
        for end in range(max(self._n_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._n_indexed = len(tokens)


def _continued(tokens: Sequence[int], start: int, limit: int) -> list[int]:
    guessed = list(tokens[start : start + limit])
    for place in range(limit - len(guessed)):
        guessed.append(guessed[place])
    return guessed


@dataclass(slots=True, kw_only=True)
class AdaptiveDrafter:
    """Asks for as many guesses as pay (sequences.Drafter).

    With a share `p` of guesses right, `k` guesses give 1 + p + … + p^k tokens for the time of a
    step with `k` rows more. `most` caps `k`. Where no guess pays, one is made now and then, to see
    whether that has changed.
    """

    guesser: Guesser
    cost: StepCost
    most: int = MAX_DRAFT_TOKENS
    acceptance: float = 0.7
    n_proposed: int = 0
    n_accepted: int = 0
    _chances: int = field(default=0)

    @property
    def length(self) -> int:
        """How many guesses pay, by what is known."""
        best, best_rate = 0, 1.0
        tokens, likely = 1.0, 1.0
        for length in range(1, self.most + 1):
            likely *= self.acceptance
            tokens += likely
            rate = tokens / (1 + self.cost.extra(length))
            if rate > best_rate * 1.001:
                best, best_rate = length, rate
        return best

    def prepare(self, tokens: Sequence[int]) -> bool:
        """See sequences.Drafter."""
        length = self.length
        return not length or self.guesser.prepare(tokens, length)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See sequences.Drafter."""
        length = min(limit, self.length)
        if length == 0:
            self._chances += 1
            if self._chances % _PROBE_EVERY:
                return []
            length = min(limit, 1)
        return self.guesser.guess(tokens, length)

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """See sequences.Drafter. Guesses after the first wrong one say nothing."""
        self.n_proposed += n_proposed
        self.n_accepted += n_accepted
        n_judged = n_accepted + (n_accepted < n_proposed)
        share = 0.85**n_judged
        self.acceptance = self.acceptance * share + (n_accepted / n_judged) * (1 - share)
