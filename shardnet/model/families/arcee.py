"""Arcee's AFM (transformers, modeling_arcee.py): Llama whose MLP has no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, attention, plain_mlp, pre_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read an ArceeConfig."""
    config = read_decoder(
        fields, max_positions=4096, norm_eps=1e-5, intermediate_size=18432, activation="relu2"
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's parameters, but for the gate."""
    mlp = plain_mlp(config, layer, "up_proj", "down_proj")
    return attention(config, layer) | mlp | pre_norms(config, layer)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import PlainMlp, SelfAttention

    mlp = f"model.layers.{layer}.mlp"
    return llama.pre_norm_layer(
        config,
        weights,
        layer,
        SelfAttention.load(config, weights, layer),
        PlainMlp.load(config, weights, f"{mlp}.up_proj", f"{mlp}.down_proj"),
    )


FAMILY = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="arcee", read=llama.read_gguf, interleaved_rotary=True),
)
