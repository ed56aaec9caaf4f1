"""GLM-4-0414 (transformers, modeling_glm4.py): norms around both sub-layers, heads half rotated.

Columns of a head that turn together stand side by side; gate and up are stored as one.
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
from shardnet.model.families import phi3
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, attention, norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.norms import Norm
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Glm4Config."""
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        head_size=128,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    return replace(config, attention_bias=fields.take("attention_bias", bool, True), has_pairs=True)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name attention, of which the output has no bias, Phi-3's MLP and four norms."""
    return (
        attention(config, layer, output_bias=False)
        | phi3.joined_mlp(config, layer)
        | norms(config, layer, "input_layernorm", "post_self_attn_layernorm")
        | norms(config, layer, "post_attention_layernorm", "post_mlp_layernorm")
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.decoder_layer import Layer, Residual
    from shardnet.model.layers.modules import SelfAttention

    def norm(name: str) -> Norm:
        return weights.norm(f"model.layers.{layer}.{name}", config.norm_eps)

    return Layer.of(
        Residual(before=norm("input_layernorm"), after=norm("post_self_attn_layernorm")),
        SelfAttention.load(config, weights, layer),
        Residual(before=norm("post_attention_layernorm"), after=norm("post_mlp_layernorm")),
        phi3.load_joined_mlp(config, weights, layer),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    bias = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    return read_gguf_decoder(fields, tensors, factors) | bias


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="glm4", read=read_gguf),
)
