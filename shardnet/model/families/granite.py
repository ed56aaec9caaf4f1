"""Granite (transformers, modeling_granite.py): Llama with a multiplier in every place."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import record

_SSM: Final = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")


def read_config(fields: Fields) -> ModelConfig:
    """Read a GraniteConfig."""
    return read_multipliers(fields, llama.read_config(fields))


def read_multipliers(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Add the multipliers to `config`."""
    return replace(
        config,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata, with experts or without."""
    fields.require("rope.scaling.finetuned", only=True)  # false where there are no positions
    config = read_gguf_decoder(fields, tensors, factors, has_biases=True)
    return config | read_gguf_multipliers(fields)


def _read_dense_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata. Granite 4 without Mamba says of which sizes Mamba would be."""
    fields.ignore(*(f"ssm.{key}" for key in _SSM))
    fields.require("expert_count", 0)
    fields.ignore("expert_used_count", "expert_shared_feed_forward_length")
    return read_gguf(fields, tensors, factors)


def read_gguf_multipliers(fields: Fields) -> dict[str, Any]:
    """Read the multipliers, every one of which has to stand in the metadata."""
    return {
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
    }


FAMILY = record(
    "granite",
    "GraniteForCausalLM",
    read_config,
    gguf=GgufFormat(architecture="granite", read=_read_dense_gguf, interleaved_rotary=True),
)
