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

from shardnet.model.drafters.state_drafter import StateDrafter, chunks
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.modules import Attention
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import SlotId

MOST_CHAINED = 31
"""Tokens that are drafted at once: the most rows of a step, without the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Attention over token embeddings beside hidden states, each normed, with its residual.

    The residual is the hidden states, normed ones with `norms_residual`.
    """

    embed: Callable[[Tensor], Tensor]
    norm_tokens: Callable[[Tensor], Tensor]
    hidden_norm: Norm
    norms_residual: bool
    self_attn: Attention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] and the step's tokens through it: [T, E]."""
        embedded = self.norm_tokens(self.embed(step.token_ids))
        normed = self.hidden_norm(hidden)
        inner = self.self_attn(torch.cat((embedded, normed), -1), index, rotary, step)
        return (normed if self.norms_residual else hidden) + inner


@dataclass(eq=False, kw_only=True)
class Eagle3Drafter(StateDrafter):
    """An EAGLE-3 head. `state_norms`, if any, norm the states of each layer before they are fused."""

    layer: Layer
    state_norms: Sequence[Norm]

    def _draft(
        self, slot: SlotId, ids: Sequence[int], place: int, states: Tensor, limit: int
    ) -> list[int]:
        """See StateDrafter."""
        if self.state_norms:
            parts = zip(self.state_norms, states.chunk(len(self.layers), -1), strict=True)
            states = torch.cat([norm(part.contiguous()) for norm, part in parts], -1)
        for rows in chunks(len(ids)):
            step = self._step(slot, ids[rows], place + rows.start)
            hidden = self.layer(self.fuse(states[rows]), 0, *step)
        drafts: list[int] = []
        for at in range(limit):
            if at:
                step = self._step(slot, drafts[-1:], place + len(ids) + at - 1)
                hidden = self.layer(hidden, 0, *step)
            hidden = hidden[-1:]
            drafts += self._likeliest(hidden)
        return drafts
