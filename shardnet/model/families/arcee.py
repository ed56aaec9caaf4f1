"""Arcee's AFM (transformers, modeling_arcee.py): Llama whose MLP has no gate."""

from __future__ import annotations

from dataclasses import replace

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import UP_DOWN


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


FAMILY = record(
    "arcee",
    "ArceeForCausalLM",
    read_config,
    Layout(mlp=UP_DOWN),
    gguf=GgufFormat(architecture="arcee", read=llama.read_gguf, interleaved_rotary=True),
)
