"""Qwen3-MoE's layers: Qwen3's, with experts in the place of the MLP in most of them.

Knows the forward pass of Qwen3MoeForCausalLM (transformers, modeling_qwen3_moe.py), with Hugging
Face's parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.families.qwen3 import load_qwen3_layer
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.weight_source import WeightSource


def load_qwen3_moe_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    experts = config.layer_experts(layer)
    if experts is None:
        return load_qwen3_layer(config, weights, layer)
    mlp = f"model.layers.{layer}.mlp"
    sparse = SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{mlp}.gate", precise=True)),
        experts=load_experts(config, weights, f"{mlp}.experts", experts.n_experts),
    )
    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    return llama_layer(config, weights, layer, self_attn, sparse)


def load_experts(
    config: ModelConfig, weights: WeightSource, prefix: str, n_experts: int
) -> list[GatedMlp]:
    """Take the parameters of all experts of a layer, each under Llama's names for an MLP."""
    return [GatedMlp.load(config, weights, f"{prefix}.{number}") for number in range(n_experts)]
