"""StarCoder2 (transformers, modeling_starcoder2.py): LayerNorms, an MLP without a gate, biases."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import plain_part


def read_config(fields: Fields) -> ModelConfig:
    """Read a Starcoder2Config, with the published keys that transformers goes without."""
    fields.ignore("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.require(key, only=True)
    fields.require("scale_attn_weights", only=True)
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=4096,
        norm_eps=1e-5,
        norm_key="norm_epsilon",
        intermediate_size=12288,
        activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    has_bias = fields.take("use_bias", bool, True)
    return replace(
        config,
        attention_bias=has_bias,
        mlp_bias=has_bias,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; windows are left out, as llama.cpp does."""
    norm = ("attention.layer_norm_epsilon", "norm_epsilon")
    bias = {"use_bias": gguf_biases(tensors)["attention_bias"]}
    return read_gguf_decoder(fields, tensors, factors, norm=norm) | bias


FAMILY = record(
    "starcoder2",
    "Starcoder2ForCausalLM",
    read_config,
    Layout(mlp=plain_part("c_fc", "c_proj"), has_norm_bias=True),
    gguf=GgufFormat(architecture="starcoder2", read=read_gguf),
)
