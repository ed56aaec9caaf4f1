"""Nemotron and Minitron (transformers, modeling_nemotron.py): LayerNorms, an MLP without a gate.

Half of each head is rotated. Norms store what exceeds 1.
"""

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
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import UP_DOWN


def read_config(fields: Fields) -> ModelConfig:
    """Read a NemotronConfig."""
    config = read_decoder(
        fields,
        max_positions=4096,
        norm_eps=1e-5,
        norm_key="norm_eps",
        intermediate_size=24576,
        activation="relu2",
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    return replace(
        config,
        norm_offset=1.0,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    norm = ("attention.layer_norm_epsilon", "norm_eps")
    config = read_gguf_decoder(fields, tensors, factors, norm=norm, may_be_partial=True)
    return config | gguf_biases(tensors)


FAMILY = record(
    "nemotron",
    "NemotronForCausalLM",
    read_config,
    Layout(mlp=UP_DOWN, has_norm_bias=True),
    gguf=GgufFormat(architecture="nemotron", read=read_gguf),
)
