"""Mistral (transformers, modeling_mistral.py): Llama with a sliding window in all layers.

In GGUF it goes as Llama, without a window, as llama.cpp computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import has_params_experts, read_decoder, read_window
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import ConsolidatedFormat
from shardnet.model.families.layout import record

PARAMS_POSITIONS = 32768
"""Positions where params.json does not say."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a MistralConfig: one window for all layers, 4096 unless it says null."""
    config = read_decoder(fields, n_kv_heads=8, max_positions=131072)
    return replace(config, windows=(read_window(fields, 4096),) * config.n_layers)


def read_params(fields: Fields) -> dict[str, Any]:
    """Read Mistral's params.json (github.com/mistralai/mistral-inference)."""
    positions = fields.positive("max_seq_len", PARAMS_POSITIONS)
    quantization: Mapping[str, Any] = fields.take("quantization", dict, {})
    if quantization:
        _check_quantization(fields.inner("quantization", quantization))
    return {
        "intermediate_size": fields.positive("hidden_dim"),
        "max_position_embeddings": fields.positive("max_position_embeddings", positions),
        "sliding_window": fields.optional("sliding_window"),
    }


def _check_quantization(fields: Fields) -> None:
    """Refuse weights that are stored in anything but FP8 with one scale for each."""
    kind = fields.take("qformat_weight", str)
    if kind != "fp8_e4m3":
        raise fields.unsupported("qformat_weight", kind, "fp8_e4m3")
    fields.ignore("qscheme_act")  # activations are not quantised here
    fields.note_the_rest()


FAMILY = record(
    "mistral",
    "MistralForCausalLM",
    read_config,
    consolidated=ConsolidatedFormat(
        claims=lambda fields: not fields.given("multiple_of") and not has_params_experts(fields),
        read=read_params,
    ),
)
