"""ERNIE 4.5 (transformers, modeling_ernie4_5.py): Llama whose pairs of columns are adjacent."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import llama
from shardnet.model.families.family import Family, GgufFormat


def read_config(fields: Fields) -> ModelConfig:
    """Read an Ernie4_5Config."""
    return read_ernie(fields, n_kv_heads=2, head_size=128)


def read_ernie(fields: Fields, *, n_kv_heads: int, head_size: int | None) -> ModelConfig:
    """Read what the dense models and those with experts say alike. The arguments are defaults."""
    config = read_decoder(
        fields,
        n_kv_heads=n_kv_heads,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=head_size,
        is_tied=True,
        rope=partial(read_rope, theta=500000.0),
    )
    has_bias = fields.take("use_bias", bool, False)
    return replace(config, attention_bias=has_bias, mlp_bias=has_bias, has_pairs=True)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    bias = {"use_bias": gguf_biases(tensors)["attention_bias"]}
    return read_gguf_decoder(fields, tensors, factors) | bias


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    read_config=read_config,
    layer_tensors=llama.layer_tensors,
    load_stage=llama.FAMILY.load_stage,
    gguf=GgufFormat(architecture="ernie4_5", read=read_gguf),
)
