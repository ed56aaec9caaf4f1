"""Phi-3 and Phi-4 (transformers, modeling_phi3.py): Llama with the projections stored joined.

That only a part of each head is rotated, and how, follows from the config.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import Table, linears, pre_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.modules import GatedMlp, SelfAttention
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Phi3Config: part of each head rotated, other rotary tables for long contexts."""
    fields.require("full_attn_mod", 1)
    fields.require("interpolate_factor", 1)
    aliases = {"su": "longrope", "yarn": "longrope"}  # of the first versions
    rope = partial(read_rope, aliases=aliases, may_be_partial=True, original=4096)
    config = read_decoder(fields, max_positions=4096, norm_eps=1e-5, rope=rope)
    return replace(config, windows=(fields.optional("sliding_window"),) * config.n_layers)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name queries, keys and values as one linear, gate and up as another."""
    attention = joined_attention(config, layer)
    return attention | joined_mlp(config, layer) | pre_norms(config, layer)


def joined_attention(config: ModelConfig, layer: int, *, with_bias: bool = False) -> Table:
    """Name queries, keys and values as one linear, and the output, which has no bias."""
    attn, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    joined = linears(attn, {"qkv_proj": (queries + 2 * keys, hidden)}, with_bias=with_bias)
    return joined | linears(attn, {"o_proj": (hidden, queries)})


def joined_mlp(config: ModelConfig, layer: int) -> Table:
    """Name gate and up of a layer's MLP as one linear, and down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    return linears(f"model.layers.{layer}.mlp", shapes)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    self_attn = load_joined_attention(config, weights, layer)
    mlp = load_joined_mlp(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, mlp)


def load_joined_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take the parameters of the attention of the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.shards.cut import HEADS_EACH, Axis

    attn = f"model.layers.{layer}.self_attn"
    return SelfAttention.of(
        config,
        layer,
        qkv_proj=weights.linear(f"{attn}.qkv_proj", outputs=HEADS_EACH),
        o_proj=weights.linear(f"{attn}.o_proj", inputs=Axis.HEADS),
    )


def load_joined_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> GatedMlp:
    """Take the parameters of the MLP of the absolute `layer`."""
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.shards.cut import INNER_EACH, Axis

    mlp = f"model.layers.{layer}.mlp"
    return GatedMlp(
        activation=config.activation,
        gate_up_proj=weights.linear(f"{mlp}.gate_up_proj", outputs=INNER_EACH),
        down_proj=weights.linear(f"{mlp}.down_proj", inputs=Axis.INNER),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata, where a window of 0 is none."""
    window = fields.take("attention.sliding_window", int, 0)
    return read_gguf_decoder(fields, tensors, factors) | {"sliding_window": window or None}


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="phi3", read=read_gguf),
)
