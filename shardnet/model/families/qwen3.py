"""Qwen3's layer: Llama's, with a norm over each head of queries and keys.

Knows the forward pass of Qwen3ForCausalLM (transformers, modeling_qwen3.py), with Hugging Face's
parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.weight_source import WeightSource


def load_qwen3_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    mlp = GatedMlp.load(config, weights, f"model.layers.{layer}.mlp")
    return llama_layer(config, weights, layer, self_attn, mlp)
