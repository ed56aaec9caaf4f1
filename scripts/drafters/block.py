"""A drafter that drafts a block of tokens in one pass over the model's states (DFlash, 2026)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .chains import begin_like
from .layer import Layer

BLOCK_LAYERS = (2, 4, 6)
"""The states that it reads: those after so many of the model's 8 layers."""
BLOCK, N_LAYERS, MASK = 8, 2, 1
"""Tokens of a block, of which the first is known; layers; what stands for an unknown token."""


class Block(nn.Module):
    """Layers whose rows see the states of the text before their block, and all of the block."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        width, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.layers = nn.ModuleList(Layer(model.config, head_norms=True) for _ in range(N_LAYERS))
        self.norm = LlamaRMSNorm(width, eps)
        self.fc = nn.Linear(len(BLOCK_LAYERS) * width, width, bias=False)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        for ours, theirs in zip(self.layers, model.model.layers[-N_LAYERS:], strict=True):
            begin_like(ours, theirs)
        begin_like(self.norm, model.model.norm)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)

    def forward(
        self, states: dict[int, Tensor], ids: Tensor, anchors: Tensor, table: Tensor
    ) -> Tensor:
        """Give rows [B, N, BLOCK, E] of blocks that begin at anchors [N] of the text ids [B, T]."""
        known = torch.cat([states[layer] for layer in BLOCK_LAYERS], -1)
        context = self.hidden_norm(self.fc(known))
        blocks = torch.full((len(ids), len(anchors), BLOCK), MASK)
        blocks[:, :, 0] = ids[:, anchors]
        hidden = table[blocks.flatten(1)]
        places = (anchors[:, None] + torch.arange(BLOCK)).flatten()
        sees = torch.arange(ids.shape[1]) < anchors.repeat_interleave(BLOCK)[:, None]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            hidden = layer.finish(hidden + _attend(layer, context, hidden, places, sees))
        rows: Tensor = self.norm(hidden)
        return rows.view(len(ids), len(anchors), BLOCK, -1)


def _attend(layer: Layer, context: Tensor, hidden: Tensor, places: Tensor, sees: Tensor) -> Tensor:
    attention, rows = layer.self_attn, layer.input_layernorm(hidden)
    queries = attention.queries(rows, places)
    before, values = attention.keys(context, torch.arange(context.shape[1]))
    own, own_values = (_by_block(part) for part in attention.keys(rows, places))
    beyond = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)
    inside = (_by_block(queries) @ own.mT).flatten(2, 3)
    scores = torch.cat((queries @ before.mT + beyond, inside), -1)
    shares = scores.mul(attention.size**-0.5).softmax(-1)
    found = shares[..., :-BLOCK] @ values
    found = found + (_by_block(shares[..., -BLOCK:]) @ own_values).flatten(2, 3)
    joined: Tensor = attention.joined(found)
    return joined


def _by_block(rows: Tensor) -> Tensor:
    return rows.reshape(*rows.shape[:2], -1, BLOCK, rows.shape[-1])
