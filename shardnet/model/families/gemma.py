"""The layer of Gemma 2 and of Gemma 3's text models: norms before and after both halves.

Knows the forward passes of Gemma2ForCausalLM and Gemma3ForCausalLM (transformers,
modeling_gemma2.py and modeling_gemma3.py), with Hugging Face's parameter names. Windows, soft caps,
scales and rotary positions follow from the config. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.decoder_layer import Layer, Residual
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import WeightSource


def load_gemma2_layer(
    config: ModelConfig, weights: WeightSource, layer: int, *, with_head_norm: bool = False
) -> Layer:
    """Take the parameters of the absolute `layer`."""
    prefix = f"model.layers.{layer}"

    def norm(name: str) -> Norm:
        return weights.norm(f"{prefix}.{name}", config.norm_eps, config.norm_offset)

    return Layer.of(
        Residual(before=norm("input_layernorm"), after=norm("post_attention_layernorm")),
        SelfAttention.load(config, weights, layer, with_head_norm=with_head_norm),
        Residual(
            before=norm("pre_feedforward_layernorm"), after=norm("post_feedforward_layernorm")
        ),
        GatedMlp.load(config, weights, f"{prefix}.mlp"),
    )


def load_gemma3_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`: Gemma 2's, and norms over heads."""
    return load_gemma2_layer(config, weights, layer, with_head_norm=True)
