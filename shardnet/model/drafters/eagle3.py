"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused hidden states of three layers.

Knows the maths of the authors' module (github.com/SafeAILab/EAGLE, cnets.py) and of SpecForge's.
Must not know files.

At position p it takes the fused states there and the embedding of the token at p + 1, and gives the
token at p + 2. For one further on it takes its own output at p, before the norm, as the states of
p + 1. It may know a part of the vocabulary only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.drafters.state_drafter import DrafterSlots
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import PREFILL_CHUNK_ROWS, SlotId

MOST_CHAINED = 31
"""Tokens that are drafted at once: the rows of a step, without the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Attention over token embeddings beside hidden states, each normed, with its residual.

    The residual is the hidden states, normed ones with `norms_residual`.
    """

    embed: Callable[[Tensor], Tensor]
    token_norm: Norm
    hidden_norm: Norm
    norms_residual: bool
    self_attn: SelfAttention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] and the step's tokens through it: [T, E]."""
        embedded = self.token_norm(self.embed(step.token_ids))
        normed = self.hidden_norm(hidden)
        inner = self.self_attn(torch.cat((embedded, normed), -1), index, rotary, step)
        return (normed if self.norms_residual else hidden) + inner


@dataclass(eq=False, kw_only=True)
class Eagle3Drafter:
    """An EAGLE-3 head; see StateDrafter.

    `state_norms` norm the states of each layer before they are fused, if there are any. `known` are
    the ids, int64 [draft vocabulary], of the tokens that it knows, None for all.
    """

    layers: tuple[int, ...]
    slots: DrafterSlots
    state_norms: tuple[Norm, ...]
    fuse: Linear
    layer: Layer
    norm: Norm
    lm_head: Linear
    known: Tensor | None
    most: int = MOST_CHAINED

    @property
    def context(self) -> int:
        """See StateDrafter."""
        return self.slots.context

    def free(self, slot: SlotId) -> None:
        """See StateDrafter."""
        self.slots.free(slot)

    @torch.inference_mode()
    def draft(
        self,
        slot: SlotId,
        token_ids: Sequence[int],
        position: int,
        states: Tensor,
        limit: int,
    ) -> list[int]:
        """See StateDrafter."""
        skipped = max(0, len(token_ids) - self.context)
        ids, states = token_ids[skipped:], states[skipped:]
        place = self.slots.begin(slot, position + skipped, len(ids))
        hidden, end = states[:0], place + len(ids)
        for start in range(0, len(ids), PREFILL_CHUNK_ROWS):
            rows = slice(start, start + PREFILL_CHUNK_ROWS)
            hidden = self._run(slot, ids[rows], place + start, self._fused(states[rows]))
        drafts: list[int] = []
        for at in range(min(limit, self.most)):
            if drafts:
                hidden = self._run(slot, drafts[-1:], end + at - 1, hidden)
            hidden = hidden[-1:]
            best = self.lm_head(self.norm(hidden))[0].argmax()
            drafts.append(int(best if self.known is None else self.known[best]))
        return drafts

    def _fused(self, states: Tensor) -> Tensor:
        """Fuse the states [T, layers x E] of the model to hidden states [T, E] of its own."""
        states = states.to(self.slots.kv.device, self.slots.kv.dtype)
        if self.state_norms:
            parts = states.chunk(len(self.state_norms), -1)
            normed = zip(self.state_norms, parts, strict=True)
            states = torch.cat([norm(part.contiguous()) for norm, part in normed], -1)
        return self.fuse(states)

    def _run(self, slot: SlotId, ids: Sequence[int], place: int, hidden: Tensor) -> Tensor:
        step = self.slots.step(slot, place, ids)
        return self.layer(hidden, 0, self.slots.rotary.at(step.positions), step)
