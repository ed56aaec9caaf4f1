"""OLMo-2's layer: norms after both halves, none before, and over all queries and all keys.

Knows the forward pass of Olmo2ForCausalLM (transformers, modeling_olmo2.py), with Hugging Face's
parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.decoder_layer import Layer, Residual
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import WeightSource


def load_olmo2_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    prefix = f"model.layers.{layer}"
    attn = f"{prefix}.self_attn"

    def norm(name: str) -> Norm:
        return weights.norm(f"{prefix}.{name}", config.norm_eps)

    qk_norm = _WholeNorm(
        n_heads=config.n_heads, queries=norm("self_attn.q_norm"), keys=norm("self_attn.k_norm")
    )
    self_attn = SelfAttention.of(
        config,
        layer,
        qkv_proj=weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        o_proj=weights.linear(f"{attn}.o_proj"),
        qk_norm=qk_norm,
    )
    return Layer.of(
        Residual(after=norm("post_attention_layernorm")),
        self_attn,
        Residual(after=norm("post_feedforward_layernorm")),
        GatedMlp.load(config, weights, f"{prefix}.mlp"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WholeNorm:
    """One norm over all heads of the queries, one over all of the keys."""

    n_heads: int
    queries: Norm  # [H x D]
    keys: Norm  # [KV heads x D]

    @property
    def per_head(self) -> None:
        """None: it normalizes over all heads."""

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize every row of [T, H + KV heads, D]."""
        queries = self.queries(heads[:, : self.n_heads].flatten(1))
        keys = self.keys(heads[:, self.n_heads :].flatten(1))
        return torch.cat((queries, keys), -1).view_as(heads)
