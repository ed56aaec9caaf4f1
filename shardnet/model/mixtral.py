"""Mixtral's layer: Llama's, with experts in the place of the MLP.

Knows the forward pass of MixtralForCausalLM (transformers, modeling_mixtral.py), with Hugging
Face's parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.blocks import Attention, GatedMlp, SelfAttention
from shardnet.model.config import ModelConfig
from shardnet.model.experts import SoftmaxRouter, SparseMlp
from shardnet.model.layers import Norm
from shardnet.model.rotary import Rotary
from shardnet.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayer:
    """Norm, attention, norm, experts, each half added to what went in."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: SparseMlp

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        self_attn: Attention,
        mlp: SparseMlp,
    ) -> SparseLayer:
        """Put the norms of the absolute `layer`, by Llama's names, before its halves."""
        prefix = f"model.layers.{layer}"
        return cls(
            input_layernorm=weights.norm(f"{prefix}.input_layernorm", config.norm_eps),
            self_attn=self_attn,
            post_attention_layernorm=weights.norm(
                f"{prefix}.post_attention_layernorm", config.norm_eps
            ),
            mlp=mlp,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), index, rotary, step)
        inner, experts = self.mlp(self.post_attention_layernorm(hidden))
        step.tell_experts(index, experts)
        return hidden + inner


def load_mixtral_layer(config: ModelConfig, weights: WeightSource, layer: int) -> SparseLayer:
    """Take the parameters of the absolute `layer`."""
    self_attn = SelfAttention.load(config, weights, layer)
    return SparseLayer.of(config, weights, layer, self_attn, _experts(config, weights, layer))


def _experts(config: ModelConfig, weights: WeightSource, layer: int) -> SparseMlp:
    """Take router and experts: `w1` is the gate, `w3` goes up, `w2` down."""
    assert config.experts is not None
    prefix = f"model.layers.{layer}.block_sparse_moe"
    experts = [f"{prefix}.experts.{number}" for number in range(config.experts.n_experts)]
    return SparseMlp(
        router=SoftmaxRouter.of(config.experts, weights.linear(f"{prefix}.gate", precise=True)),
        experts=[
            GatedMlp(
                activation=config.activation,
                gate_up_proj=weights.linear(f"{expert}.w1", f"{expert}.w3"),
                down_proj=weights.linear(f"{expert}.w2"),
            )
            for expert in experts
        ],
    )
