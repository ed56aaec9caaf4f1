"""Draft tokens of a sequence, and how many of them pay. Pure.

Knows token ids, the acceptance rate and the cost of rows (design decision 5). Must not know slots,
frames or models: the scheduler reports how many drafts were accepted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final, Protocol

from shardnet.errors import UsageError
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.slot_operations import MAX_DRAFTS

MAX_DRAFT_TOKENS = MAX_DRAFTS
"""Together with the newest token, the rows that a step computes for about the cost of one."""

_PROBE_EVERY, _PROBE_ROWS = 16, 64
"""A drafter that does not pay proposes one token again after so many opportunities; where a row
costs much, after the time of so many."""
_LENGTHS: Final = (*range(9), 10, 12, 15, 18, 23, 31)
"""How many drafts a frame may have: each is weighed."""
_LEAST_WASTE: Final = 0.1
"""What a frame of wrong drafts costs at least, as part of the slowest stage's time: energy, and the
memory that stages may share."""
_PROMISED: Final = 1.05
"""A flight has to promise so many times the speed of drafts that wait: its waste takes energy."""
_MOST_MATCHED: Final = 32
"""Tokens before a draft that are compared with those before its source."""
SIZES: Final = (6, 3, 2)
"""Lengths of the n-grams that are looked up, in this order."""
_ELSEWHERE: Final = 3
"""That of those that are looked up in other texts."""
_MOST_KEPT: Final = 16384
"""A longer text is not looked up by others: its index takes some hundred bytes a token."""
_MOST_BEHIND, _FORGIVEN = 3.0, 0.0125
"""Drafts may cost so many tokens' time more than they give, and so much of each token's after that:
3 % of 200 tokens together."""
_FLIGHT_SPARE: Final = 2.0
"""Drafts fly only where so much of that is left: else what flights cost would be taken from drafts
that wait."""


def check_drafts(*, rewinds: bool) -> None:
    """Raise UsageError where layers keep a state in modules of transformers."""
    if not rewinds:
        raise UsageError(
            "--speculate: this model is computed by modules of transformers, which keep a state "
            "that cannot be rewound when drafts are rejected",
            remedy="leave --speculate off",
        )


class DraftSource(Protocol):
    """Proposes draft tokens for one sequence.

    `kinds` are those of the drafts that `draft` returned last: drafts of one kind are about equally
    likely. `flies` says whether it drafts on behind its own drafts.
    """

    kinds: Sequence[int]
    flies: bool

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Start drafting at most `limit` tokens after `tokens`; return whether they are ready."""

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return at most `limit` draft tokens after `tokens`, which only grows between calls.

        They go behind the drafts `ahead`.
        """

    def close(self) -> None:
        """Release what it holds."""


class NgramDrafts:
    """Prompt lookup: the tokens that followed the last n-gram where it occurred before.

    After "Prompt Lookup Decoding" (A. Saxena, 2023), with an index that grows with the text: a
    draft costs the same however long the text is. Its kind says how many tokens before it are
    those before its source.
    """

    flies = True

    def __init__(self, before: deque[NgramDrafts] | None = None) -> None:
        """Look up n-grams of SIZES, in this order; the first match counts.

        Those of _ELSEWHERE are looked up in the texts `before`, too, of which this one becomes the
        last.
        """
        self._before = before
        self._next: dict[tuple[int, ...], int] = {}
        self._tokens: Sequence[int] = ()
        self._n_indexed = 0
        self.kinds: Sequence[int] = ()

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True: look-up needs no preparation."""
        return True

    def close(self) -> None:
        """Keep the text for others to look up."""
        if self._before is not None and 0 < self._n_indexed <= _MOST_KEPT:
            self._before.append(self)
            self._before = None

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """See DraftSource. A match at the end of the text continues with its own drafts."""
        self._index(tokens)
        text = (*tokens[-_MOST_MATCHED:], *ahead)
        for size in SIZES:
            start = self._next.get(text[-size:]) if len(text) > size else None
            if start is not None:
                self._note_kinds(tokens, start, text, limit)
                return _continued(tokens, ahead, start, limit)
            for other in reversed(self._before or ()) if size == _ELSEWHERE else ():
                start = other._next.get(text[-size:])
                if start is not None:
                    drafts = [*other._tokens[start : start + limit]]
                    self._note_kinds(other._tokens, start, text, len(drafts))
                    return drafts
        return []

    def _note_kinds(
        self, source: Sequence[int], start: int, text: Sequence[int], n_drafts: int
    ) -> None:
        n_matched = _common_suffix(source[max(0, start - _MOST_MATCHED) : start], text)
        self.kinds = [min(n_matched + n, _MOST_MATCHED).bit_length() for n in range(n_drafts)]

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the token after each n-gram, the latest occurrence wins; the last has none yet."""
        for end in range(max(self._n_indexed, 1), len(tokens)):
            for size in SIZES:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._tokens, self._n_indexed = tokens, len(tokens)


class RingDrafts:
    """What the ring's tail has drafted behind the newest token (MTP), and behind that look-up.

    It drafts anew with every answer: a draft's kind is how many of its others are before it.
    """

    flies = True

    def __init__(self) -> None:
        """Begin without any."""
        self._position = 0
        self._token_ids: Sequence[int] = ()
        self._behind = NgramDrafts()
        self.kinds: Sequence[int] = ()

    def take(self, position: int, token_ids: Sequence[int]) -> None:
        """Keep the drafts for the positions from `position` on, in place of those before."""
        self._position, self._token_ids = position, token_ids

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True: drafts come with the token that they follow, or not at all."""
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the drafts made for exactly so many tokens, and what is looked up behind them.

        Where they differ from those `ahead`, which were made before, these are likely wrong:
        nothing goes behind them.
        """
        made = [*self._token_ids] if self._position == len(tokens) else []
        depth = len(ahead)
        if made[:depth] != [*ahead[: len(made)]]:
            return []
        drafts = made[depth : depth + limit]
        behind = self._behind.draft(tokens, limit - len(drafts), [*ahead, *drafts])
        looked_up = self._behind.kinds[: len(behind)]
        own = range(depth, depth + len(drafts))
        self.kinds = [*own, *(MAX_DRAFT_TOKENS + kind for kind in looked_up)]
        return drafts + behind

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def _continued(tokens: Sequence[int], ahead: Sequence[int], start: int, limit: int) -> list[int]:
    drafts = list(tokens[start : start + limit])
    drafts += ahead[: limit - len(drafts)]
    for place in range(limit - len(drafts)):
        drafts.append(drafts[place])
    return drafts


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass(slots=True, kw_only=True)
class AdaptiveDrafter:
    """Proposes as many drafts as pay (sequences.Drafter).

    Drafts that are right with the probabilities `p1`, `p2`, … give 1 + p1 + p1 p2 + … tokens for
    the time of a frame with so many more rows. Where several frames may be in flight, the rest of
    the drafts follows in frames of the same size, each at the pace of the slowest stage and with
    the probability that all before it are right: else the next right one may have to wait for it.
    `most` caps the drafts of a frame. Where no draft pays, one is proposed now and then to measure
    again. No drafts are risked that would take it too far behind plain decoding, were they wrong.
    """

    draft_source: DraftSource
    cost: StepCost
    most: int = MAX_DRAFT_TOKENS
    acceptance: float = 0.7
    n_proposed: int = 0
    n_accepted: int = 0
    _kinds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of each kind of draft, recently: those that were right, and those that were judged."""
    _in_flight: list[int] = field(default_factory=list)
    """The kinds of the drafts in flight."""
    _n_frames: int = 0
    """How many frames they are."""
    _flies: bool = False
    """Whether it pays that drafts go behind them."""
    _n_without: int = field(default=0)
    """Opportunities since drafts have paid, or one was proposed."""
    _n_behind: float = 0.0
    """Tokens that plain decoding would have made more."""

    @property
    def length(self) -> int:
        """How many drafts pay at the measured acceptance rate and row cost."""
        return self._best([self.acceptance] * self.most, 1)

    def prepare(self, tokens: Sequence[int]) -> bool:
        """See sequences.Drafter."""
        wanted = self.length or self._n_probed
        return not wanted or self.draft_source.prepare(tokens, wanted)

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        n_frames: int = 1,
    ) -> list[int]:
        """See sequences.Drafter."""
        n_frames = min(n_frames, self._most_frames)
        if ahead is not None:
            return self._propose_behind(tokens, limit, ahead, n_frames)
        self._n_frames = 1
        drafts = self.draft_source.draft(tokens, self.most * min(n_frames, 2))
        likely = [self._likely(kind) for kind in self.draft_source.kinds[: len(drafts)]]
        length = self._best(likely, n_frames)
        drafts = drafts[: min(limit, length or self._n_probed)]
        self._in_flight = [*self.draft_source.kinds[: len(drafts)]]
        self._n_without = 0 if length or drafts else self._n_without + 1
        return drafts

    def _propose_behind(
        self, tokens: Sequence[int], limit: int, ahead: Sequence[int], n_frames: int
    ) -> list[int]:
        """Propose a frame behind those in flight, if it is likely enough that it is not wasted."""
        if self._n_frames >= n_frames or not self._flies or self._spare < _FLIGHT_SPARE:
            return []
        del self._in_flight[len(ahead) :]
        drafts = self.draft_source.draft(tokens, self.most, ahead)
        if not drafts:
            return []
        kinds = self.draft_source.kinds[: len(drafts)]
        likely = [self._likely(kind) for kind in kinds]
        reached = math.prod(map(self._likely, self._in_flight)) * likely[0]
        if not self._pays_behind(reached, *self._pace(n_frames)):
            return []
        drafts = drafts[: min(limit, 1 + self._best(likely[1:], n_frames))]
        self._flies = True
        self._in_flight += kinds[: len(drafts)]
        self._n_frames += 1
        self._n_without = 0
        return drafts

    def _best(self, likely: Sequence[float], n_frames: int) -> int:
        """Count the drafts of a frame that give the most tokens a second, and note if it flies."""
        reach = [*accumulate(likely, mul)]
        gains = [0.0, *accumulate(reach)]
        period, waste = self._pace(n_frames)
        row = self.cost.extra(1)
        best, best_rate, self._flies = 0, 0.0, False
        known = max(1, 2 * self.cost.most_rows - 1)  # what more rows cost is not known
        most = min(len(likely), self.most, known)
        most = min(most, int(self._spare / row)) if row else most
        for length in _LENGTHS:
            if length > most:
                break
            tokens, time, flies = 1 + gains[length], 1.0, False
            for place in range(length, len(reach) if n_frames > 1 else 0, length + 1):
                if not self._pays_behind(reach[place], period, waste):
                    break
                flies = True
                time += period * reach[place] + waste * (1 - reach[place])
                tokens += gains[min(place + length + 1, len(reach))] - gains[place]
            time *= (1 + row * length) * (self.cost.company * _PROMISED if flies else 1)
            if tokens / time > best_rate * 1.001:
                best, best_rate, self._flies = length, tokens / time, flies
        return best

    @property
    def _most_frames(self) -> int:
        """Frames that fill the stages: of more, all would only wait for the slowest one."""
        return max(1, int(1 / self.cost.slowest + 0.5)) if self.draft_source.flies else 1

    def _pace(self, n_frames: int) -> tuple[float, float]:
        """Return the time between frames in flight, and what a wrong one costs.

        Both are parts of a frame's round trip. The slowest stage computes a wrong frame while the
        right one waits, if it was given more of them than a round trip has time for.
        """
        slowest = self.cost.slowest
        return max(slowest, 1 / n_frames), max(n_frames * slowest - 1, _LEAST_WASTE * slowest)

    @staticmethod
    def _pays_behind(reached: float, period: float, waste: float) -> bool:
        """Say whether a frame pays that is right so far with the probability `reached`."""
        return reached * (1 - period) > (1 - reached) * waste

    def _likely(self, kind: int) -> float:
        """Return how likely a draft of a kind is, which is that of all drafts at first."""
        n_right, n_judged = self._kinds.get(kind, (0.0, 0.0))
        return (n_right + self.acceptance) / (n_judged + 1)

    @property
    def _spare(self) -> float:
        """Tokens' time that may be risked."""
        return max(0.0, _MOST_BEHIND - self._n_behind)

    @property
    def _n_probed(self) -> int:
        """1 where it is time to propose a draft although none pays, else 0."""
        row = self.cost.extra(1)
        every = max(_PROBE_EVERY, _PROBE_ROWS * row)
        return int(self._n_without + 1 >= every and self._spare >= row)

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """See sequences.Drafter. Drafts after the first rejected one carry no information."""
        self.n_proposed += n_proposed
        self.n_accepted += n_accepted
        n_judged = n_accepted + (n_accepted < n_proposed)
        for place, kind in enumerate(self._in_flight[:n_judged]):
            n_right, n_before = self._kinds.get(kind, (0.0, 0.0))
            is_right = place < n_accepted
            self._kinds[kind] = (0.9 * n_right + is_right, 0.9 * n_before + 1)
        del self._in_flight[:n_proposed]
        self._n_frames -= 1
        share = 0.85**n_judged
        self.acceptance = self.acceptance * share + (n_accepted / n_judged) * (1 - share)

    def took(self, n_tokens: int, time_s: float) -> None:
        """Note how long some tokens took, of a sequence that had the ring to itself."""
        plain_s = self.cost.one_row_s
        if plain_s:
            lost = time_s / plain_s - n_tokens * (1 + _FORGIVEN)
            self._n_behind = max(0.0, self._n_behind + lost)
