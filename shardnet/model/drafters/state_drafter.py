"""Drafters that read hidden states of the model that they draft for: EAGLE-3 heads and DFlash.

Knows their maths, and what they keep of each slot. Must not know files, the ring, nor which drafts
are accepted: what is read again is overwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, step_over, store_rows
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.modules import Attention
from shardnet.model.layers.norms import HeadNorm, Norm
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
        ids = [*token_ids[-self.context :]]
        place = self._begin(slot, position + len(token_ids) - len(ids), len(ids))
        states = states[-len(ids) :].to(self.kv.device, self.kv.dtype)
        try:
            return self._draft(slot, ids, place, states, min(limit, self.most))
        except BaseException:  # it does not hold what it was to read
            self.free(slot)
            raise

    @abstractmethod
    def _draft(self, slot: SlotId, ids: list[int], place: int, states: Tensor, n: int) -> list[int]:
        """Read rows at a place of the slot, then draft at most `n` tokens: see `draft`."""

    def free(self, slot: SlotId) -> None:
        """Forget the slot."""
        self._held.pop(slot, None)
        self.kv.free(slot)

    def _begin(self, slot: SlotId, position: int, n_rows: int) -> int:
        """Let the slot end behind rows from `position` on; return where in it they begin."""
        first, end = self._held.get(slot, (position, position))
        is_here = first <= position <= end and position + n_rows - first <= self.context
        n_back = end + self.most + 1 - position
        if not is_here or (n_back > REWIND_ROWS and any(self.kv.windows)):
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


MOST_CHAINED = 31
"""Tokens that are drafted at once: the most rows of a step, without the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Attention over token embeddings beside hidden states, each normed, with its residual.

    The residual is the hidden states, normed ones with `norms_residual`.
    """

    embed: Callable[[Tensor], Tensor]
    token_norm: Norm
    hidden_norm: Norm
    norms_residual: bool
    self_attn: Attention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] and the step's tokens through it: [T, E]."""
        embedded = self.token_norm(self.embed(step.token_ids))
        normed = self.hidden_norm(hidden)
        inner = self.self_attn(torch.cat((embedded, normed), -1), index, rotary, step)
        return (normed if self.norms_residual else hidden) + inner


@dataclass(eq=False, kw_only=True)
class Eagle3Drafter(StateDrafter):
    """An EAGLE-3 head (arXiv 2503.01840): one decoder layer over fused states of three layers.

    As the authors' module (github.com/SafeAILab/EAGLE, cnets.py) and SpecForge's compute it: at
    position p it takes the fused states there and the embedding of the token at p + 1, and gives
    the token at p + 2. For one further on it takes its own output at p, before the norm, as the
    states of p + 1. `state_norms`, if any, norm the states of each layer before all else.
    """

    layer: Layer
    state_norms: Sequence[Norm]

    def _draft(self, slot: SlotId, ids: list[int], place: int, states: Tensor, n: int) -> list[int]:
        """See StateDrafter."""
        if self.state_norms:
            parts = zip(self.state_norms, states.chunk(len(self.layers), -1), strict=True)
            states = torch.cat([norm(part.contiguous()) for norm, part in parts], -1)
        for start in range(0, len(ids), PREFILL_CHUNK_ROWS):
            rows = slice(start, start + PREFILL_CHUNK_ROWS)
            step = self._step(slot, ids[rows], place + start)
            hidden = self.layer(self.fuse(states[rows]), 0, *step)
        drafts: list[int] = []
        for at in range(n):
            if at:
                step = self._step(slot, drafts[-1:], place + len(ids) + at - 1)
                hidden = self.layer(hidden, 0, *step)
            hidden = hidden[-1:]
            drafts += self._likeliest(hidden)
        return drafts


@dataclass(eq=False, kw_only=True)
class DFlashDrafter(StateDrafter):
    """A DFlash drafter (arXiv 2602.06036): a block of tokens in one pass, none waiting for another.

    As the published module (github.com/z-lab/dflash, model.py) computes it: the states of certain
    positions are fused, normed, and projected to keys and values of every layer. The block begins
    with the token behind them; masks, `mask_id`, stand behind it, each of which becomes a draft.
    All see each other, but in layers with a window, where a row sees those before it (SpecForge,
    vLLM and SGLang; the published module leaves that to the kernel). Of a block all is computed,
    however few drafts are wanted.

    `project` gives keys and values of all its own layers, in order; `key_norm` is of all keys.
    """

    embed: Callable[[Tensor], Tensor]
    own_layers: Sequence[Layer]
    fused_norm: Norm
    project: Linear
    key_norm: HeadNorm
    mask_id: int

    def _draft(self, slot: SlotId, ids: list[int], place: int, states: Tensor, n: int) -> list[int]:
        """See StateDrafter."""
        for start in range(0, len(ids), PREFILL_CHUNK_ROWS):
            rows = slice(start, start + PREFILL_CHUNK_ROWS)
            self._read(slot, ids[rows], place + start, states[rows])
        if n == 0:
            return []
        block = [ids[-1], *[self.mask_id] * self.most]
        rotary, step = self._step(slot, block, place + len(ids), see_each_other=True)
        hidden = self.embed(step.token_ids)
        for index, layer in enumerate(self.own_layers):
            hidden = layer(hidden, index, rotary, step)
        return self._likeliest(hidden[1 : n + 1])

    def _read(self, slot: SlotId, ids: Sequence[int], place: int, states: Tensor) -> None:
        """Store keys and values of states [T, layers x E] in every layer."""
        rotary, step = self._step(slot, ids, place)
        n_rows, n_layers, size = len(ids), len(self.own_layers), self.key_norm.weight.shape[-1]
        projected = self.project(self.fused_norm(self.fuse(states)))
        heads = projected.view(n_rows, n_layers, 2, -1, size)  # [T, layers, 2, KV heads, D]
        keys = rotary.rotate(self.key_norm(heads[:, :, 0].reshape(n_rows, -1, size)))
        for index, own in enumerate(keys.chunk(n_layers, 1)):
            store_rows(own, heads[:, index, 1], index, step)
