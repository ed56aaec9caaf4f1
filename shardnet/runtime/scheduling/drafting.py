"""Draft tokens of a sequence, and how many of them pay. Pure.

Knows token ids, the acceptance rate and the cost of rows (design decision 5). Must not know slots,
frames or models: the scheduler reports how many drafts were accepted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple, Protocol

from shardnet.errors import UsageError
from shardnet.runtime.scheduling.acceptance import Acceptance, DraftCounts, Key
from shardnet.runtime.scheduling.sequences import ALONE, Company
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.slot_operations import MAX_DRAFTS

NGRAM, MTP, FORCED = "ngram", "mtp", "forced"
"""Names of drafters: look-up, the tail's layer, and what a constraint allows alone."""

MAX_DRAFT_TOKENS = MAX_DRAFTS
"""Together with the newest token, the rows that a step computes for about the cost of one."""

_ASK_EVERY, _ASKED, _PROBE_EVERY = 16, 4, 64
"""A drafter that is not worth its wait is asked for 4 drafts again after 16 opportunities, and
where none pays one row is sent to measure it after 64; where that costs much, after 64 times it."""
_LENGTHS: Final = (*range(9), 10, 12, 15, 18, 23, 31)
"""How many drafts a frame may have: each is weighed."""
_LEAST_WASTE: Final = 0.1
"""What a frame of wrong drafts costs at least, as part of the slowest stage's time: energy, and the
memory that stages may share."""
_PROMISED: Final = 1.05
"""A flight has to promise so many times the speed of drafts that wait: its waste takes energy. So
has a drafter that is waited for."""
_MOST_MATCHED: Final = 32
"""Tokens before a draft that are compared with those before its source."""
SIZES: Final = (6, 3, 2)
"""Lengths of the n-grams that are looked up, in this order."""
_ELSEWHERE: Final = 3
"""That of those that are looked up in other texts."""
_MOST_KEPT: Final = 16384
"""A longer text is not looked up by others: its index takes some hundred bytes a token."""
_MOST_BEHIND, _FORGIVEN = 2.75, 0.0125
"""Drafts may cost so many tokens' time more than they give, and so much of each token's after that:
3 % of 200 tokens together."""
_SURE: Final = 0.85
"""One draft that is so likely, and twice as likely as it is dear, is risked whatever was lost."""
_FLIGHT_SPARE: Final = 1.75
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
    """What the ring's tail has drafted behind the newest token (MTP).

    It drafts anew with every answer: a draft's kind is how many of its others are before it.
    """

    kinds: Sequence[int] = ()
    flies = True

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

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the drafts made for exactly so many tokens.

        Where they differ from those `ahead`, which were made before, these are likely wrong:
        nothing goes behind them.
        """
        made = [*self._token_ids] if self._position == len(tokens) else []
        depth = len(ahead)
        if made[:depth] != [*ahead[: len(made)]]:
            return []
        drafts = made[depth : depth + limit]
        self.kinds = range(depth, depth + len(drafts))
        return drafts

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


class _Chain(NamedTuple):
    """Drafts behind each other for the positions from `start` on, the first by the drafter `name`.

    Those without a key are judged with another chain.
    """

    name: str
    start: int
    drafts: Sequence[int]
    keys: Sequence[Key | None]


class _Choice(NamedTuple):
    """How many drafts a frame has, the tokens for the time of a step of one row, if it flies."""

    length: int
    rate: float
    flies: bool


@dataclass(slots=True, kw_only=True)
class AdaptiveDrafter:
    """Proposes as many drafts as pay (sequences.Drafter), of that drafter whose are worth most.

    Drafts that are right with the probabilities `p1`, `p2`, … give 1 + p1 + p1 p2 + … tokens for
    the time of a frame with so many more rows. Where several frames may be in flight, the rest of
    the drafts follows in frames of the same size, each at the pace of the slowest stage and with
    the probability that all before it are right: else the next right one may have to wait for it.
    `most` caps the drafts of a frame. Where no draft pays, one is proposed now and then to measure
    again. No drafts are risked that would take it too far behind plain decoding, were they wrong.

    Drafts are those of `draft_source`, which is called `name`, with what is looked up behind them,
    or what `look_up` finds alone. All are judged by the tokens that come, those that are not sent
    too. A source that is waited for costs its wait, by `clock`, in seconds.
    """

    draft_source: DraftSource
    cost: StepCost
    name: str = NGRAM
    look_up: DraftSource | None = None
    most: int = MAX_DRAFT_TOKENS
    acceptance: InitVar[float] = 0.7
    """How likely drafts are as long as nothing is known of them."""
    clock: Callable[[], float] = lambda: 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    _acceptance: Acceptance = field(init=False)
    _chains: list[_Chain] = field(default_factory=list)
    """What is judged next: of each drafter the drafts of one moment, as far as they are right."""
    _in_flight: list[Key] = field(default_factory=list)
    """The drafts in flight."""
    _n_frames: int = 0
    """How many frames they are."""
    _flies: bool = False
    """Whether it pays that drafts go behind them."""
    _n_without: float = math.inf
    """Opportunities since drafts have paid, or one was proposed."""
    _n_behind: float = 0.0
    """Tokens that plain decoding would have made more."""
    _n_blamed: int = 0
    """Steps to come that drafts may make slower than plain ones."""
    _unpriced_s: float = 0.0
    """How long steps took since it was last known how long a plain one takes."""
    _n_unpriced: int = 0
    _prepared: int = 0
    """The tokens for which the source was asked, or was not worth it."""
    _asked: int = 0
    """How many drafts of it are waited for."""
    _asked_s: float = 0.0
    _wait_s: float | None = None
    """How long it was waited for lately; the first time, when it reads the prompt, aside."""
    _n_unasked: int = 0
    """How often it was not worth its wait since it was."""

    def __post_init__(self, acceptance: float) -> None:
        self._acceptance = Acceptance(acceptance)

    def close(self) -> None:
        """Release what the sources hold."""
        self.draft_source.close()
        if self.look_up is not None:
            self.look_up.close()

    def prepare(self, tokens: Sequence[int]) -> bool:
        """See sequences.Drafter."""
        if self._prepared != len(tokens):
            self._prepared, self._asked_s = len(tokens), self.clock()
            self._asked = self._wanted(tokens)
        if self._asked and self.draft_source.prepare(tokens, self._asked):
            self._asked = 0
            waited_s, before_s = self.clock() - self._asked_s, self._wait_s
            usual_s = max(4 * (before_s or 0.0), self.cost.plain_s or waited_s)
            waited_s = min(waited_s, usual_s)  # being late once says little
            self._wait_s = 0.0 if before_s is None else ((before_s or waited_s) + waited_s) / 2
            self._n_blamed = max(self._n_blamed, int(waited_s > 0))
        return not self._asked

    def _wanted(self, tokens: Sequence[int]) -> int:
        """Count the drafts to ask the source for: 0 where they are not worth their wait."""
        plain_s = self.cost.plain_s
        wait = (self._wait_s or 0.0) / plain_s if plain_s else 0.0
        length, rate, _ = self._best([self._acceptance.likely(self.name)] * self.most, wait=wait)
        if wait and length:
            found = self.look_up.draft(tokens, self.most) if self.look_up is not None else ()
            keys = self._keys(NGRAM, self.look_up, len(found))
            if rate <= _PROMISED * max(1.0, self._best(self._acceptance.all(keys)).rate):
                length = 0
        self._n_unasked = 0 if length else self._n_unasked + 1
        if self._n_unasked >= max(_ASK_EVERY, _PROBE_EVERY * wait) and self._spare >= wait:
            self._n_unasked, length = 0, min(_ASKED, self.most)
        return length

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        n_frames: int = 1,
        company: Company = ALONE,
    ) -> list[int]:
        """See sequences.Drafter."""
        n_frames = min(n_frames, self._most_frames)
        if ahead is not None:
            return self._propose_behind(tokens, limit, ahead, n_frames)
        self._n_frames, self._flies = 1, False
        n_frames = n_frames if self._spare >= _FLIGHT_SPARE else 1
        best, drafts, found = _Choice(0, 0.0, flies=False), [], []
        for made, keys in self._drafted(tokens, self.most * min(n_frames, 2), ()):
            choice = self._best(self._acceptance.all(keys), n_frames, company)
            if keys[0][0] != NGRAM:  # these took time, whether they are sent or not
                self._n_blamed = max(self._n_blamed, 1)
            if choice.rate > best.rate:
                best, drafts, found = choice, made, keys
        drafts = drafts[: min(limit, best.length or self._n_probed)]
        self._flies, self._in_flight = best.flies, [*found[: len(drafts)]]
        self._n_without = 0 if drafts else self._n_without + 1
        return drafts

    def _propose_behind(
        self, tokens: Sequence[int], limit: int, ahead: Sequence[int], n_frames: int
    ) -> list[int]:
        """Propose a frame behind those in flight, if it is likely enough that it is not wasted."""
        if self._n_frames >= n_frames or not self._flies or self._spare < _FLIGHT_SPARE:
            return []
        del self._in_flight[len(ahead) :]
        made = self._drafted(tokens, self.most, ahead)
        reached = math.prod(self._acceptance.all(self._in_flight))
        best, drafts, found = 0.0, [], []
        for behind, keys in made:
            likely = self._acceptance.all(keys)
            gain = sum(accumulate(likely, mul))
            if gain > best and self._pays_behind(reached * likely[0], *self._pace(n_frames)):
                n_drafts = min(limit, 1 + self._best(likely[1:], n_frames).length)
                best, drafts, found = gain, behind[:n_drafts], keys[:n_drafts]
        if drafts:
            self._in_flight += found
            self._n_frames += 1
            self._n_without = 0
        return drafts

    def _drafted(
        self, tokens: Sequence[int], limit: int, ahead: Sequence[int]
    ) -> list[tuple[list[int], list[Key]]]:
        """Draft behind `tokens` and the drafts `ahead`: by each source, and what goes behind it.

        They are judged later: to their end, so that deep drafts are judged too, or the first draft
        alone where others of the drafter are judged still.
        """
        made, look_up, depth = [], self.look_up, len(ahead)
        names = self._settle(tokens)
        for name, source in ((self.name, self.draft_source), (NGRAM, look_up)):
            if source is None or (ahead and not source.flies):
                continue
            drafts = [*source.draft(tokens, limit, ahead)]
            keys = self._keys(name, source, len(drafts), depth)
            if drafts and source is not look_up and look_up is not None:
                behind = look_up.draft(tokens, limit - len(drafts), [*ahead, *drafts])
                keys += self._keys(NGRAM, look_up, len(behind), depth + len(drafts))
                drafts += behind
            if drafts:
                made.append((drafts, keys))
                judged = slice(1 if name in names else None)
                text, known = [*ahead, *drafts[judged]], [None] * depth
                self._chains.append(_Chain(name, len(tokens), text, [*known, *keys[judged]]))
        return made

    @staticmethod
    def _keys(name: str, source: DraftSource | None, n_drafts: int, depth: int = 0) -> list[Key]:
        """Return the keys of the drafts that a source has just made, so deep behind others."""
        kinds = source.kinds[:n_drafts] if source is not None else ()
        return [(name, kind, (depth + n).bit_length()) for n, kind in enumerate(kinds)]

    def _settle(self, tokens: Sequence[int]) -> set[str]:
        """Judge drafts by the tokens that came; return whose are right so far, and go on."""
        alive = []
        for chain in self._chains:
            came = tokens[chain.start : chain.start + len(chain.drafts)]
            for token_id, draft, key in zip(came, chain.drafts, chain.keys, strict=False):
                if key is not None:
                    self._acceptance.judge(key, is_right=token_id == draft)
                if token_id != draft:
                    break
            else:
                rest = chain.drafts[len(came) :], chain.keys[len(came) :]
                alive += [_Chain(chain.name, len(tokens), *rest)] if rest[0] else []
        self._chains = alive
        return {chain.name for chain in alive}

    def _best(
        self,
        likely: Sequence[float],
        n_frames: int = 1,
        company: Company = ALONE,
        wait: float = 0.0,
    ) -> _Choice:
        """Choose how many drafts a frame has for the most tokens a second, and if others follow.

        All tokens of all that share steps count. `wait` is what the drafts are waited for, in steps
        of one row.
        """
        reach = [*accumulate(likely, mul)]
        gains = [0.0, *accumulate(reach)]
        period, waste = self._pace(n_frames)
        row = self.cost.extra(1)
        alone = 1 + row * company.n_others
        known = max(1, 2 * self.cost.most_rows - 1)  # what more rows cost is not known
        most = min(len(likely), self.most, known)
        if row and likely:
            is_sure = likely[0] > max(_SURE, 2 * row)
            spare = max(self._spare, row) if is_sure else self._spare
            most = min(most, int(min(spare, company.slack * alone) / row))
        best = _Choice(0, 0.0, flies=False)
        for length in _LENGTHS:
            if length > most:
                break
            tokens, time, flies = 1 + company.n_others + gains[length], 1.0, False
            for place in range(length, len(reach) if n_frames > 1 else 0, length + 1):
                if not self._pays_behind(reach[place], period, waste):
                    break
                flies = True
                time += period * reach[place] + waste * (1 - reach[place])
                tokens += gains[min(place + length + 1, len(reach))] - gains[place]
            time *= (alone + row * length) * (self.cost.company * _PROMISED if flies else 1)
            if tokens / (time + wait) > best.rate * 1.001:
                best = _Choice(length, tokens / (time + wait), flies)
        return best

    @property
    def _most_frames(self) -> int:
        """Frames that fill the stages: of more, all would only wait for the slowest one."""
        flies = self.draft_source.flies or (self.look_up is not None and self.look_up.flies)
        return max(1, int(1 / self.cost.slowest + 0.5)) if flies else 1

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

    @property
    def _spare(self) -> float:
        """Tokens' time that may be risked."""
        return max(0.0, _MOST_BEHIND - self._n_behind)

    @property
    def _n_probed(self) -> int:
        """1 where it is time to propose a draft although none pays, as at first, else 0."""
        row = self.cost.extra(1)
        every = _PROBE_EVERY * max(1.0, row)
        return int(self._n_without + 1 >= every and self._spare >= row)

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """See sequences.Drafter."""
        names = [name for name, _, _ in self._in_flight[:n_proposed]]
        del self._in_flight[:n_proposed]
        self._n_frames -= 1
        goes_on = n_accepted == n_proposed and self._n_frames > 0
        self.counts.note(names, n_accepted, n_accepted + (not goes_on))
        self._n_blamed = 2

    def took(self, n_tokens: int, time_s: float) -> None:
        """Note how long some tokens took, of a sequence that had the ring to itself.

        Steps without drafts, and not behind such, are what plain ones are.
        """
        plain_s = self.cost.plain_s
        if self._n_blamed:
            self._unpriced_s += time_s
            self._n_unpriced += n_tokens
        if plain_s:
            lost = self._unpriced_s / plain_s - self._n_unpriced - n_tokens * _FORGIVEN
            self._n_behind = max(0.0, self._n_behind + lost)
            self._unpriced_s, self._n_unpriced = 0.0, 0
        self._n_blamed = max(0, self._n_blamed - 1)
