"""Qwen3-MoE (transformers, modeling_qwen3_moe.py): Qwen3 with experts in most layers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_sparse_layers,
    read_window,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import SOFTMAX_EXPERTS, STACKED, read_experts
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3MoeConfig. A window that is switched on is in all layers, unlike Qwen3's."""
    config = read_decoder(fields, n_kv_heads=4, max_positions=32768, attention_bias=False)
    fields.require("use_qk_norm", only=True)
    fields.require("qkv_bias", only=False)
    fields.require("shared_expert_intermediate_size", 0)
    fields.ignore("max_window_layers")
    window = read_window(fields, 4096)
    is_used = fields.take("use_sliding_window", bool, False)
    windows = (window if is_used else None,) * config.n_layers
    config = replace(config, has_head_norms=True, windows=windows)
    layers = read_sparse_layers(fields, config.n_layers)
    return read_experts(fields, config, layers, counts=(128, 8), inner=768)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_shared_feed_forward_length", 0)
    config = read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)
    return config | {
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
    }


FAMILY = record(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read_config,
    Layout(mlp=SOFTMAX_EXPERTS),
    **STACKED,
    gguf=GgufFormat(architecture="qwen3moe", multimodal=("qwen3vlmoe",), read=read_gguf),
    pretokenizer="qwen2",
)
