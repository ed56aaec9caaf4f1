"""Qwen 3.5's text models with experts (transformers, modeling_qwen3_5_moe.py)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_delta_net
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import STACKED
from shardnet.model.families.family import MtpNames
from shardnet.model.families.layout import record
from shardnet.model.families.qwen3_5 import LAYOUT, read_text_config
from shardnet.model.families.qwen3_next import (
    gguf_format,
    read_gguf_hybrid,
    with_experts,
)


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5MoeTextConfig: every layer has experts, and weights that sum to 1."""
    config = read_text_config(fields, n_kv_heads=2, intermediate_size=5632)
    fields.require("norm_topk_prob", True)
    layers = tuple(range(config.n_layers))
    return with_experts(fields, config, layers, n_experts=256, top_k=8, normalizes=True)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_hybrid(fields, tensors, factors) | read_gguf_delta_net(
        fields, takes_turns=True
    )


FAMILY = record(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    read_config,
    LAYOUT,
    mtp=MtpNames.PREFIX,
    **STACKED,
    gguf=gguf_format("qwen35moe", read_gguf),
    pretokenizer="qwen35",
)
