"""Draft tokens of a sequence, and how many of them pay. Pure.

Knows token ids, the acceptance rate and the cost of rows (design decision 5). Must not know slots,
frames or models: the scheduler reports how many drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardnet.errors import UsageError
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.slot_operations import MAX_DRAFTS

MAX_DRAFT_TOKENS = MAX_DRAFTS
"""Together with the newest token, the rows that a step computes for about the cost of one."""

_PROBE_EVERY = 16
"""A drafter that does not pay proposes one token again after so many opportunities."""


def check_drafts(*, has_state: bool) -> None:
    """Raise UsageError where layers keep a state: memory to rewind it was planned for MTP alone."""
    if has_state:
        raise UsageError(
            "--speculate: layers of this model keep a state that cannot be rewound when drafts are "
            "rejected",
            remedy="leave --speculate off, or choose mtp where the checkpoint has its layer",
        )


class DraftSource(Protocol):
    """Proposes draft tokens for one sequence."""

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Start drafting at most `limit` tokens after `tokens`; return whether they are ready."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` draft tokens after `tokens`, which only grows between calls."""

    def close(self) -> None:
        """Release what it holds."""


class NgramDrafts:
    """Prompt lookup: the tokens that followed the last n-gram where it occurred before.

    After "Prompt Lookup Decoding" (A. Saxena, 2023), with an index that grows with the text: a
    draft costs the same however long the text is.
    """

    def __init__(self, sizes: Sequence[int] = (4, 3, 2)) -> None:
        """Look up n-grams of these lengths, in this order; the first match counts."""
        self._sizes = tuple(sizes)
        self._next: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True: look-up needs no preparation."""
        return True

    def close(self) -> None:
        """Do nothing: look-up holds no resources."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See DraftSource. A match at the end of the text continues with its own drafts."""
        self._index(tokens)
        for size in self._sizes:
            start = self._next.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if start is not None:
                return _continued(tokens, start, limit)
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the token after each n-gram, the latest occurrence wins; the last has none yet."""
        for end in range(max(self._n_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._n_indexed = len(tokens)


class RingDrafts:
    """What the ring's tail has drafted behind the newest token (MTP)."""

    def __init__(self) -> None:
        """Begin without any."""
        self._position = 0
        self._token_ids: Sequence[int] = ()

    def take(self, position: int, token_ids: Sequence[int]) -> None:
        """Keep the drafts for the positions from `position` on, in place of those before."""
        self._position, self._token_ids = position, token_ids

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True: drafts come with the token that they follow, or not at all."""
        return True

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return the drafts made for exactly so many tokens; none if there are others."""
        return [*self._token_ids[:limit]] if self._position == len(tokens) else []

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def _continued(tokens: Sequence[int], start: int, limit: int) -> list[int]:
    drafts = list(tokens[start : start + limit])
    for place in range(limit - len(drafts)):
        drafts.append(drafts[place])
    return drafts


@dataclass(slots=True, kw_only=True)
class AdaptiveDrafter:
    """Proposes as many drafts as pay (sequences.Drafter).

    At an acceptance rate of `p`, `k` drafts give 1 + p + … + p^k tokens for the time of a step with
    `k` more rows. `most` caps `k`. Where no draft pays, one is proposed now and then to measure
    again.
    """

    draft_source: DraftSource
    cost: StepCost
    most: int = MAX_DRAFT_TOKENS
    acceptance: float = 0.7
    n_proposed: int = 0
    n_accepted: int = 0
    _n_without: int = field(default=0)
    """Opportunities since drafts have paid, or one was proposed."""

    @property
    def length(self) -> int:
        """How many drafts pay at the measured acceptance rate and row cost."""
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
        wanted = self.length or self._n_probed
        return not wanted or self.draft_source.prepare(tokens, wanted)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See sequences.Drafter."""
        length = self.length
        wanted = min(limit, length or self._n_probed)
        drafts = self.draft_source.draft(tokens, wanted) if wanted else []
        self._n_without = 0 if length or drafts else self._n_without + 1
        return drafts

    @property
    def _n_probed(self) -> int:
        """1 where it is time to propose a draft although none pays, else 0."""
        return int(self._n_without + 1 >= _PROBE_EVERY)

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """See sequences.Drafter. Drafts after the first rejected one carry no information."""
        self.n_proposed += n_proposed
        self.n_accepted += n_accepted
        n_judged = n_accepted + (n_accepted < n_proposed)
        share = 0.85**n_judged
        self.acceptance = self.acceptance * share + (n_accepted / n_judged) * (1 - share)
