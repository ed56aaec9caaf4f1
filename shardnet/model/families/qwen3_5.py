"""Qwen 3.5's text models (transformers, modeling_qwen3_5.py): Qwen3-Next without experts.

The linears of a DeltaNet have their columns in another order, and stand apart in the files.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_delta_net
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.families.family import Family, MtpNames, decoder_stage
from shardnet.model.families.qwen3_next import (
    gguf_format,
    hybrid_tensors,
    load_hybrid,
    read_hybrid,
)
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.gated_delta import Project
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5TextConfig."""
    return read_text_config(fields, n_kv_heads=4, intermediate_size=12288)


def read_text_config(fields: Fields, *, n_kv_heads: int, intermediate_size: int) -> ModelConfig:
    """Read what both text models say alike. The numbers are defaults.

    States are float32 here whatever `mamba_ssm_dtype` says, as in transformers.
    """
    fields.ignore("mamba_ssm_dtype")
    return read_hybrid(fields, n_kv_heads=n_kv_heads, intermediate_size=intermediate_size)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    config = read_gguf_decoder(fields, tensors, factors, may_be_partial=True)
    return config | read_gguf_delta_net(fields, takes_turns=True)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the parameters: a DeltaNet has four linears before the convolution."""
    own, hidden = config.delta_net, config.hidden_size
    shapes: dict[str, tuple[int, int]] = {}
    if own is not None:
        shapes = {
            "in_proj_qkv": (own.mixed_width, hidden),
            "in_proj_z": (own.value_width, hidden),
            "in_proj_b": (own.n_value_heads, hidden),
            "in_proj_a": (own.n_value_heads, hidden),
        }
    return hybrid_tensors(config, layer, shapes)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    return load_hybrid(config, weights, layer, _projections)


def _projections(own: DeltaNet, weights: WeightSource, prefix: str) -> Project:
    from shardnet.model.layers.gated_delta import Projections

    return Projections(
        config=own,
        qkvz_proj=weights.linear(f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"),
        ba_proj=weights.linear(f"{prefix}.in_proj_b", f"{prefix}.in_proj_a", precise=True),
        groups_qkvz=False,
        groups_ba=False,
    )


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    mtp=MtpNames.PREFIX,
    gguf=gguf_format("qwen35", read_gguf),
    pretokenizer="qwen35",
)
