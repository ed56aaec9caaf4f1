"""OLMo-2 (transformers, modeling_olmo2.py): norms after the sub-layers, and over all queries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, attention, mlp, norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read an Olmo2Config."""
    config = read_decoder(fields, norm_eps=1e-5)
    return replace(config, attention_bias=fields.take("attention_bias", bool, False))


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's linears, norms over all queries and all keys, and norms after sub-layers."""
    return whole_attention(config, layer) | mlp(config, layer) | post_norms(config, layer)


def whole_attention(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, and norms over all queries and all keys."""
    return attention(config, layer) | whole_norms(config, layer)


def post_norms(config: ModelConfig, layer: int) -> Table:
    """Name the norms after attention and after the MLP."""
    return norms(config, layer, "post_attention_layernorm", "post_feedforward_layernorm")


def whole_norms(config: ModelConfig, layer: int) -> Table:
    """Name the norms over all queries and over all keys."""
    attn = f"model.layers.{layer}.self_attn"
    return {
        f"{attn}.q_norm.weight": (config.n_heads * config.head_size,),
        f"{attn}.k_norm.weight": (config.n_kv_heads * config.head_size,),
    }


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    return post_norm_layer(config, weights, layer, whole_norm_attention(config, weights, layer))


def post_norm_layer(
    config: ModelConfig, weights: WeightSource, layer: int, self_attn: SelfAttention
) -> Layer:
    """Put the norms of the absolute `layer` after its sub-layers, and the residuals around."""
    from shardnet.model.layers.decoder_layer import Layer, Residual
    from shardnet.model.layers.modules import GatedMlp

    prefix = f"model.layers.{layer}"
    first = weights.norm(f"{prefix}.post_attention_layernorm", config.norm_eps)
    second = weights.norm(f"{prefix}.post_feedforward_layernorm", config.norm_eps)
    return Layer.of(
        Residual(after=first),
        self_attn,
        Residual(after=second),
        GatedMlp.load(config, weights, f"{prefix}.mlp"),
    )


def whole_norm_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take the parameters of attention in the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import WholeNorm

    attn = f"model.layers.{layer}.self_attn"
    return SelfAttention.of(
        config,
        layer,
        qkv_proj=weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        o_proj=weights.linear(f"{attn}.o_proj"),
        qk_norm=WholeNorm(
            n_heads=config.n_heads,
            queries=weights.norm(f"{attn}.q_norm", config.norm_eps),
            keys=weights.norm(f"{attn}.k_norm", config.norm_eps),
        ),
    )


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(
        architecture="olmo2",
        claims=lambda fields: not fields.given("attention.sliding_window"),
    ),
    has_whole_heads=True,
)
