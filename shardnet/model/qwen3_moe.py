"""Qwen3-MoE's layers: Qwen3's, with experts in the place of the MLP in most of them.

Knows the forward pass of Qwen3MoeForCausalLM (transformers, modeling_qwen3_moe.py), with Hugging
Face's parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.blocks import GatedMlp, SelfAttention
from shardnet.model.config import ModelConfig
from shardnet.model.decoder import DecoderLayer
from shardnet.model.experts import SoftmaxRouter, SparseMlp
from shardnet.model.mixtral import SparseLayer
from shardnet.model.qwen3 import load_qwen3_layer
from shardnet.model.weights import WeightSource


def load_qwen3_moe_layer(config: ModelConfig, weights: WeightSource, layer: int) -> DecoderLayer:
    """Take the parameters of the absolute `layer`."""
    experts = config.layer_experts(layer)
    if experts is None:
        return load_qwen3_layer(config, weights, layer)
    mlp = f"model.layers.{layer}.mlp"
    sparse = SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{mlp}.gate")),
        experts=[
            GatedMlp.load(config, weights, f"{mlp}.experts.{number}")
            for number in range(experts.n_experts)
        ],
    )
    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    return SparseLayer.of(config, weights, layer, self_attn, sparse)
