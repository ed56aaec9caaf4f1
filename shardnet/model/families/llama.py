"""Llama (transformers, modeling_llama.py): the keys of which most families have some."""

from __future__ import annotations

from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, has_gguf_experts, read_gguf_decoder
from shardnet.model.config.limits import STRETCHES, THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import ConsolidatedFormat, GgufFormat
from shardnet.model.families.layout import record

_SCALED_POSITIONS, _LLAMA3_POSITIONS, _LLAMA2_POSITIONS = 131072, 8192, 4096
_LLAMA3_THETA = 500000.0
_SMALLEST_DIM_OF_3_1 = 4096
"""The text models of Llama 3.2 are narrower, and their positions are stretched by 32, not by 8."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a LlamaConfig."""
    return read_decoder(fields, mlp_bias=False)


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of Llama and of Mistral, which the format does not distinguish."""
    fields.ignore("expert_used_count")
    return read_gguf_decoder(fields, has_biases=True)


def read_params(fields: Fields) -> dict[str, Any]:
    """Read Meta's params.json (github.com/meta-llama/llama-models)."""
    is_scaled = fields.take("use_scaled_rope", bool, False)
    theta = fields.number("rope_theta", 10000.0, within=THETAS)
    positions = _LLAMA3_POSITIONS if theta >= _LLAMA3_THETA else _LLAMA2_POSITIONS
    return {
        "intermediate_size": _intermediate_size(fields),
        "max_position_embeddings": _SCALED_POSITIONS
        if is_scaled
        else fields.positive("max_seq_len", positions),
        "rope_scaling": _rope_scaling(fields) if is_scaled else None,
    }


def _intermediate_size(fields: Fields) -> int:
    """Take 8/3 of the hidden size, stretched and rounded up, as Meta's FeedForward does."""
    if not fields.missing("hidden_dim"):
        return fields.positive("hidden_dim")
    width = int(2 * (4 * fields.positive("dim")) / 3)
    width = int(fields.number("ffn_dim_multiplier", 1.0) * width)
    multiple = fields.positive("multiple_of")
    return -(-width // multiple) * multiple


def _rope_scaling(fields: Fields) -> dict[str, Any]:
    factor = 8.0 if fields.positive("dim") >= _SMALLEST_DIM_OF_3_1 else 32.0
    return {
        "rope_type": "llama3",
        "factor": fields.number("rope_scaling_factor", factor, within=STRETCHES),
        "low_freq_factor": 1.0,
        "high_freq_factor": fields.number("rope_high_freq_factor", 4.0),
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }


FAMILY = record(
    "llama",
    "LlamaForCausalLM",
    read_config,
    gguf=GgufFormat(
        architecture="llama",
        claims=lambda fields: not has_gguf_experts(fields),
        read=read_gguf,
        interleaved_rotary=True,
    ),
    consolidated=ConsolidatedFormat(
        claims=lambda fields: fields.given("multiple_of"), read=read_params
    ),
)
