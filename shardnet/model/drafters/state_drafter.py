"""What all drafters have that read hidden states of another model, and the slots of their own.

Must not know files, the ring, nor which drafts are accepted: what is read again is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.layers.attention import ForwardStep, step_over
from shardnet.model.layers.rotary import Rotary
from shardnet.types import REWIND_ROWS, RowGroup, SequenceId, SlotId


class StateDrafter(Protocol):
    """Drafts tokens behind positions of which it is given the model's hidden states."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Which states it reads: those after so many layers of the model, 0 for the embeddings.

        After the last layer they are those before the final norm. They may repeat.
        """

    @property
    def context(self) -> int:
        """Positions that a slot holds."""

    @property
    def most(self) -> int:
        """Tokens that are drafted at once."""

    def draft(
        self,
        slot: SlotId,
        token_ids: Sequence[int],
        position: int,
        states: Tensor,
        limit: int,
    ) -> list[int]:
        """Read positions from `position` on, then draft at most `limit` tokens, greedily.

        `states` [T, layers x E] are those of T positions that are certain, in the order of
        `layers`; `token_ids` [T] the tokens behind each of them, of which drafts follow the last.
        What the slot had from `position` on is forgotten. A slot that has nothing of the position
        before, and one that is full, begins anew with these rows, the last `context` of them: it
        counts positions from its first one. With a `limit` of 0 it reads alone.
        """

    def free(self, slot: SlotId) -> None:
        """Forget the slot."""


@dataclass(eq=False, kw_only=True)
class DrafterSlots:
    """The keys and values that a drafter has of each slot, and the slot's first position.

    A slot holds `context` positions that are certain, and behind them those of drafts. `rotary` are
    the tables of all these.
    """

    kv: KvCache
    rotary: Rotary
    context: int
    _held: dict[SlotId, tuple[int, int]] = field(default_factory=dict)
    """The positions [first, end) of each slot."""

    def begin(self, slot: SlotId, position: int, n_rows: int) -> int:
        """Make room for rows from `position` on, at most `context`; return where in the slot."""
        first, end = self._held.get(slot, (position, position))
        is_here = first <= position <= end and position + n_rows - first <= self.context
        if any(self.kv.windows) and end - position > REWIND_ROWS:  # earlier rows were dropped
            is_here = False
        if not is_here:
            self.kv.free(slot)
            first = position
        self._held[slot] = first, position + n_rows
        return position - first

    def step(
        self, slot: SlotId, place: int, token_ids: Sequence[int], *, see_each_other: bool = False
    ) -> ForwardStep:
        """Prepare a step over rows at a `place` of the slot, which may `see_each_other`."""
        n_rows = len(token_ids)
        group = RowGroup(
            sequence_id=SequenceId(slot), slot=slot, position=place, n_rows=n_rows, n_sampled=0
        )
        self.kv.ensure(slot, place + n_rows, n_rows)
        block = None
        if see_each_other:
            block = PictureRows(index=torch.empty(0, dtype=torch.int64), blocks=((0, n_rows),))
        return step_over((group,), token_ids, self.kv, self.kv.dtype, pictures=block)

    def free(self, slot: SlotId) -> None:
        """Forget the slot."""
        self._held.pop(slot, None)
        self.kv.free(slot)
