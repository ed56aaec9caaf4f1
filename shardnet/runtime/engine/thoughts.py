"""Follows the reasoning of one output, and ends it at its budget. Pure.

Which token is forced, or barred, is a function of the tokens so far and of the bounds alone, so
that drafts, batches and recovery change nothing. Must not know tokenizers, nor how masks travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardnet.constraints import MaskForm, TokenMask

MOST_MARK_TOKENS: Final = 16
"""Tokens among which a mark is looked for."""


Stands = Callable[[Sequence[int]], bool]
"""Says whether a mark ends tokens: those since the last one, or the MOST_MARK_TOKENS latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Reasoning begins behind `opening`, and ends at one of `closings`; `written` ends it early.

    Behind `before` the token `barred` would begin it; None where no one token does.
    """

    opening: Stands
    closings: tuple[Stands, ...]
    written: tuple[int, ...]
    before: tuple[int, ...] = ()
    barred: int | None = None


class _State(NamedTuple):
    """Where an output of `n_output` tokens is: within reasoning by `marks` or not, of which there
    were `n_tokens`.

    `tail` are the tokens since the last mark, `n_written` those of an early end.
    """

    marks: Marks | None
    n_output: int = 0
    n_tokens: int = 0
    tail: tuple[int, ...] = ()
    n_written: int = 0


class Thoughts:
    """The reasoning of one output, which has begun where `opened` are its marks.

    It ends after `budget` tokens of it, or with token number `until` of the output.
    """

    def __init__(
        self,
        marks: Sequence[Marks],
        budget: int,
        until: int,
        opened: Marks | None = None,
    ) -> None:
        self._marks = marks
        self._budget = budget
        self._until = until
        self._state = _State(opened)

    def advance(self, token_id: int) -> None:
        """Take the next token of the output."""
        self._state = self._after(self._state, token_id)

    def masks(
        self,
        masks: Sequence[TokenMask | None],
        drafts: Sequence[int],
        ahead: Sequence[int] = (),
    ) -> list[TokenMask | None]:
        """Return the masks of the next token and behind each of `drafts`, up to one that is wrong.

        They follow the tokens `ahead`. `masks` are those of the output without this.
        """
        state = self._state
        for token_id in ahead:
            state = self._after(state, token_id)
        made: list[TokenMask | None] = []
        for place, mask in enumerate(masks):
            mask = self._over(state, mask)
            made.append(mask)
            if place < len(drafts):
                if mask is not None and not mask.allows(drafts[place]):
                    break
                state = self._after(state, drafts[place])
        return made

    def _after(self, state: _State, token_id: int) -> _State:
        marks, n_output = state.marks, state.n_output + 1
        tail = (*state.tail, token_id)[-MOST_MARK_TOKENS:]
        after = _State(marks, n_output, state.n_tokens, tail)
        outside = _State(None, n_output, state.n_tokens)
        if marks is None:
            begun = (one for one in self._marks if one.opening(tail))
            opened = next(begun, None)
            return after if opened is None else outside._replace(marks=opened)
        if token_id == self._forced(state):
            n_written = state.n_written + 1
            is_over = n_written == len(marks.written)
            return outside if is_over else after._replace(n_written=n_written)
        if any(closing(tail) for closing in marks.closings):
            return outside
        return after._replace(n_tokens=state.n_tokens + 1)

    def _is_spent(self, state: _State) -> bool:
        return state.n_tokens >= self._budget or state.n_output >= self._until

    def _forced(self, state: _State) -> int | None:
        """Return the token that must come next, None if any may."""
        if state.marks is None or not (state.n_written or self._is_spent(state)):
            return None
        return state.marks.written[state.n_written]

    def _over(self, state: _State, mask: TokenMask | None) -> TokenMask | None:
        """Return a mask with what is forced here, where it allows that, or without what is barred.

        What else must match forbids reasoning behind its end by itself.
        """
        forced = self._forced(state)
        if forced is not None and (mask is None or mask.allows(forced)):
            return _of(MaskForm.ALLOWED, [forced])
        if mask is not None or state.marks is not None or not self._is_spent(state):
            return mask
        barred = [
            marks.barred
            for marks in self._marks
            if marks.barred is not None
            and state.tail[len(state.tail) - len(marks.before) :] == marks.before
        ]
        return _of(MaskForm.FORBIDDEN, barred) if barred else None


def _of(form: MaskForm, token_ids: Sequence[int]) -> TokenMask:
    return TokenMask(form, b"".join(token_id.to_bytes(4, "little") for token_id in token_ids))
