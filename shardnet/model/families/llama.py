"""The layer of Llama, and of what differs from it by constants only: Mistral, Qwen2,
Granite.

Knows the forward pass of LlamaForCausalLM (transformers, modeling_llama.py), with Hugging Face's
parameter names. Biases and windows follow from tensor table and config. Must not know files, wire
or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.decoder_layer import Layer, Residual
from shardnet.model.layers.experts import SparseMlp
from shardnet.model.layers.modules import Attention, GatedMlp, SelfAttention
from shardnet.model.layers.weight_source import WeightSource


def load_llama_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    self_attn = SelfAttention.load(config, weights, layer)
    mlp = GatedMlp.load(config, weights, f"model.layers.{layer}.mlp")
    return llama_layer(config, weights, layer, self_attn, mlp)


def llama_layer(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    self_attn: Attention,
    mlp: GatedMlp | SparseMlp,
) -> Layer:
    """Put the norms of the absolute `layer`, by Llama's names, before its halves."""
    prefix, multiplier = f"model.layers.{layer}", config.residual_multiplier
    first = weights.norm(f"{prefix}.input_layernorm", config.norm_eps)
    second = weights.norm(f"{prefix}.post_attention_layernorm", config.norm_eps)
    return Layer.of(
        Residual(before=first, multiplier=multiplier),
        self_attn,
        Residual(before=second, multiplier=multiplier),
        mlp,
    )
