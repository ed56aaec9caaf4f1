"""OLMo-2 (transformers, modeling_olmo2.py): norms after the sub-layers, and over all queries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table, attention

if TYPE_CHECKING:
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read an Olmo2Config."""
    config = read_decoder(fields, norm_eps=1e-5)
    return replace(config, attention_bias=fields.take("attention_bias", bool, False))


def whole_attention(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, and norms over all queries and all keys."""
    return attention(config, layer) | whole_norms(config, layer)


def whole_norms(config: ModelConfig, layer: int) -> Table:
    """Name the norms over all queries and over all keys."""
    attn = f"model.layers.{layer}.self_attn"
    return {
        f"{attn}.q_norm.weight": (config.n_heads * config.head_size,),
        f"{attn}.k_norm.weight": (config.n_kv_heads * config.head_size,),
    }


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


WHOLE_HEADS: Final = Part(tensors=whole_attention, load=whole_norm_attention)
LAYOUT: Final = Layout(attention=WHOLE_HEADS, norms=POST_NORMS)

FAMILY = record(
    "olmo2",
    "Olmo2ForCausalLM",
    read_config,
    LAYOUT,
    gguf=GgufFormat(
        architecture="olmo2",
        claims=lambda fields: not fields.given("attention.sliding_window"),
    ),
    has_whole_heads=True,
)
