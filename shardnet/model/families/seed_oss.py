"""Seed-OSS (transformers, modeling_seed_oss.py): Llama with Qwen2's biases."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama, qwen2
from shardnet.model.families.family import Family, GgufFormat


def read_config(fields: Fields) -> ModelConfig:
    """Read a SeedOssConfig."""
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=524288, head_size=128, intermediate_size=27648
    )
    fields.require("attention_out_bias", False)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, True),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_decoder(fields, tensors, factors) | gguf_biases(tensors)


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    read_config=read_config,
    layer_tensors=qwen2.layer_tensors,
    load_stage=llama.FAMILY.load_stage,
    gguf=GgufFormat(architecture="seed_oss", read=read_gguf),
)
