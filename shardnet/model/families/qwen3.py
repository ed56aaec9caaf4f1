"""Qwen3 (transformers, modeling_qwen3.py): Llama with a norm over each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.qwen2 import read_qwen_windows
from shardnet.model.families.tensor_shapes import Table, head_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3Config."""
    config = read_decoder(fields, n_kv_heads=32, max_positions=32768, head_size=128)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=read_qwen_windows(fields, config.n_layers),
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's parameters and the norms over heads."""
    return llama.layer_tensors(config, layer) | head_norms(config, layer)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import GatedMlp, SelfAttention

    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    mlp = GatedMlp.load(config, weights, f"model.layers.{layer}.mlp")
    return llama.pre_norm_layer(config, weights, layer, self_attn, mlp)


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="qwen3", multimodal=("qwen3vl",)),
    pretokenizer="qwen2",
)
