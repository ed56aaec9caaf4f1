"""The layer of Phi-3 and Phi-4: Llama's, with the projections stored joined.

Knows the forward pass of Phi3ForCausalLM (transformers, modeling_phi3.py), with Hugging Face's
parameter names. That only a part of each head is rotated, and how, follows from the config. Must
not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.weight_source import WeightSource


def load_phi3_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return llama_layer(
        config,
        weights,
        layer,
        SelfAttention.of(
            config,
            layer,
            qkv_proj=weights.linear(f"{attn}.qkv_proj"),
            o_proj=weights.linear(f"{attn}.o_proj"),
        ),
        GatedMlp(
            activation=config.activation,
            gate_up_proj=weights.linear(f"{mlp}.gate_up_proj"),
            down_proj=weights.linear(f"{mlp}.down_proj"),
        ),
    )
