"""What all drafters have that read hidden states of another model, and their slots.

Must not know files, the ring, nor which drafts are accepted: what is read again is overwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, step_over
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import PREFILL_CHUNK_ROWS, REWIND_ROWS, RowGroup, SequenceId, SlotId


@dataclass(eq=False, kw_only=True)
class StateDrafter(ABC):
    """Drafts tokens behind positions of which it is given the model's hidden states.

    It reads the states after so many `layers` of the model each, 0 for the embeddings; after the
    last one they are those before the final norm. A slot of `kv` holds `context` positions that are
    certain, and behind them those of `most` drafts, which are made at once; `rotary` are the tables
    of all these. `fuse` joins the states of a position, and `norm` is that before the LM head,
    which knows the tokens with the ids `known`, int64, None for all.
    """

    layers: tuple[int, ...]
    context: int
    most: int
    kv: KvCache
    rotary: Rotary
    fuse: Linear
    norm: Norm
    lm_head: Linear
    known: Tensor | None
    _held: dict[SlotId, tuple[int, int]] = field(default_factory=dict)
    """The positions [first, end) of each slot."""

    @torch.inference_mode()
    def draft(
        self, slot: SlotId, token_ids: Sequence[int], position: int, states: Tensor, limit: int
    ) -> list[int]:
        """Read positions from `position` on, then draft at most `limit` tokens, greedily.

        `states` [T, layers x E] are those of T positions that are certain, in the order of
        `layers`; `token_ids` [T] the tokens behind each of them, of which drafts follow the last.
        What the slot had from `position` on is forgotten. A slot that has nothing of the position
        before, and one that is full, begins anew with these rows, the last `context` of them: it
        counts positions from its first one. With a `limit` of 0 it reads alone.
        """
        ids = token_ids[-self.context :]
        place = self._begin(slot, position + len(token_ids) - len(ids), len(ids))
        states = states[-len(ids) :].to(self.kv.device, self.kv.dtype)
        return self._draft(slot, ids, place, states, min(limit, self.most))

    @abstractmethod
    def _draft(
        self, slot: SlotId, ids: Sequence[int], place: int, states: Tensor, limit: int
    ) -> list[int]:
        """Read rows at a place of the slot, then draft: see `draft`."""

    def free(self, slot: SlotId) -> None:
        """Forget the slot."""
        self._held.pop(slot, None)
        self.kv.free(slot)

    def _begin(self, slot: SlotId, position: int, n_rows: int) -> int:
        """Let the slot end behind rows from `position` on; return where in it they begin."""
        first, end = self._held.get(slot, (position, position))
        is_here = first <= position <= end and position + n_rows - first <= self.context
        if not is_here or (end - position > REWIND_ROWS and any(self.kv.windows)):
            self.kv.free(slot)
            first = position
        self._held[slot] = first, position + n_rows
        return position - first

    def _step(
        self, slot: SlotId, ids: Sequence[int], place: int, *, see_each_other: bool = False
    ) -> tuple[Rotary, ForwardStep]:
        """Prepare a step over rows at a place of the slot, and the rotary tables of these."""
        group = RowGroup(
            sequence_id=SequenceId(slot), slot=slot, position=place, n_rows=len(ids), n_sampled=0
        )
        self.kv.ensure(slot, place + len(ids), len(ids))
        block = PictureRows(index=torch.empty(0), blocks=((0, len(ids)),))
        pictures = block if see_each_other else None
        step = step_over((group,), ids, self.kv, self.kv.dtype, pictures=pictures)
        return self.rotary.at(step.positions), step

    def _likeliest(self, hidden: Tensor) -> list[int]:
        """Return the likeliest tokens behind rows [R, E]."""
        best = self.lm_head(self.norm(hidden)).argmax(-1)
        found: list[int] = (best if self.known is None else self.known[best]).tolist()
        return found


def chunks(n_rows: int) -> list[slice]:
    """Cut rows into those that are read at once."""
    starts = range(0, n_rows, PREFILL_CHUNK_ROWS)
    return [slice(start, min(n_rows, start + PREFILL_CHUNK_ROWS)) for start in starts]
