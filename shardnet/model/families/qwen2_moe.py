"""Qwen2-MoE's layers: Qwen2's, with experts in most of them, one of which every row visits.

Knows the forward pass of Qwen2MoeForCausalLM (transformers, modeling_qwen2_moe.py), with Hugging
Face's parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer, load_llama_layer
from shardnet.model.families.qwen3_moe import load_experts
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.norms import row_sigmoid
from shardnet.model.layers.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert whose answer counts as much as its own gate says, from 0 to 1."""

    expert: GatedMlp
    gate: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run every row: [T, E] in and out."""
        return self.expert(hidden).mul_(row_sigmoid(self.gate(hidden)))


def load_qwen2_moe_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    experts = config.layer_experts(layer)
    if experts is None:
        return load_llama_layer(config, weights, layer)
    mlp = f"model.layers.{layer}.mlp"
    sparse = SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{mlp}.gate", precise=True)),
        experts=load_experts(config, weights, f"{mlp}.experts", experts.n_experts),
        shared=SharedExpert(
            expert=GatedMlp.load(config, weights, f"{mlp}.shared_expert"),
            gate=weights.linear(f"{mlp}.shared_expert_gate", precise=True),
        ),
    )
    self_attn = SelfAttention.load(config, weights, layer)
    return llama_layer(config, weights, layer, self_attn, sparse)
