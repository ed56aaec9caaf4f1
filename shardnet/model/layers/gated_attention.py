"""Attention whose outputs are multiplied by gates of their own (Qwen3-Next).

Knows the parameters by transformers' names. Must not know files, wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, row_sigmoid
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.shards.cut import HEADS_EACH, Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttention:
    """Attention with a norm over each head of queries and keys, and a gate for each head's output.

    `qkvg_proj` gives for each head its query and its gate, then all keys, then all values.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    kind: AttentionKind
    qkvg_proj: Linear
    qk_norm: HeadNorm
    o_proj: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> GatedAttention:
        """Take the parameters of the absolute `layer`."""
        attn = f"model.layers.{layer}.self_attn"
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_size=config.head_size,
            kind=AttentionKind.of(config, layer),
            qkvg_proj=weights.linear(
                f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", outputs=HEADS_EACH
            ),
            qk_norm=HeadNorm.join(
                weights.norm(f"{attn}.q_norm", config.norm_eps, config.norm_offset),
                weights.norm(f"{attn}.k_norm", config.norm_eps, config.norm_offset),
                config.n_heads,
                config.n_kv_heads,
            ),
            o_proj=weights.linear(f"{attn}.o_proj", inputs=Axis.HEADS),
        )

    @property
    def fusible(self) -> None:
        """None: the gates come between attention and the output linear."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        n_rows, n_heads, size = hidden.shape[0], self.n_heads, self.head_size
        heads = self.qkvg_proj(hidden).view(n_rows, -1, size)  # [T, 2 H + 2 KV heads, D]
        pairs = heads[:, : 2 * n_heads].view(n_rows, n_heads, 2, size)
        keys, values = heads[:, 2 * n_heads :].chunk(2, 1)  # [T, KV heads, D] each
        rotated = rotary.rotate(self.qk_norm(torch.cat((pairs[:, :, 0], keys), 1)))
        attended = attention(
            rotated[:, :n_heads], rotated[:, n_heads:], values, index, step, self.kind
        )
        return self.o_proj(attended * row_sigmoid(pairs[:, :, 1].flatten(1)))
