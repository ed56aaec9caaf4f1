"""Mixtral's layer: Llama's, with experts in the place of the MLP.

Knows the forward pass of MixtralForCausalLM (transformers, modeling_mixtral.py), with Hugging
Face's parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.weight_source import WeightSource


def load_mixtral_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    self_attn = SelfAttention.load(config, weights, layer)
    return llama_layer(config, weights, layer, self_attn, _experts(config, weights, layer))


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
