"""OLMo-2's layer: norms after both halves, none before, and over all queries and all keys.

Knows the forward pass of Olmo2ForCausalLM (transformers, modeling_olmo2.py), with Hugging Face's
parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.blocks import GatedMlp, SelfAttention
from shardnet.model.config import ModelConfig
from shardnet.model.layers import Norm
from shardnet.model.rotary import Rotary
from shardnet.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Layer:
    """Attention, norm, added to what went in; the same with the MLP."""

    self_attn: SelfAttention
    post_attention_layernorm: Norm
    mlp: GatedMlp
    post_feedforward_layernorm: Norm

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> Olmo2Layer:
        """Take the parameters of the absolute `layer`."""
        prefix = f"model.layers.{layer}"
        attn = f"{prefix}.self_attn"

        def norm(name: str) -> Norm:
            return weights.norm(f"{prefix}.{name}", config.norm_eps)

        qk_norm = _WholeNorm(
            n_heads=config.n_heads, queries=norm("self_attn.q_norm"), keys=norm("self_attn.k_norm")
        )
        return cls(
            self_attn=SelfAttention.of(
                config,
                layer,
                qkv_proj=weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                o_proj=weights.linear(f"{attn}.o_proj"),
                qk_norm=qk_norm,
            ),
            post_attention_layernorm=norm("post_attention_layernorm"),
            mlp=GatedMlp.load(config, weights, f"{prefix}.mlp"),
            post_feedforward_layernorm=norm("post_feedforward_layernorm"),
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        attended = self.self_attn(hidden, index, rotary, step)
        hidden = hidden + self.post_attention_layernorm(attended)
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class _WholeNorm:
    """One norm over all heads of the queries, one over all of the keys."""

    n_heads: int
    queries: Norm  # [H x D]
    keys: Norm  # [KV heads x D]

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize every row of [T, H + KV heads, D]."""
        queries = self.queries(heads[:, : self.n_heads].flatten(1))
        keys = self.keys(heads[:, self.n_heads :].flatten(1))
        return torch.cat((queries, keys), -1).view_as(heads)
