"""Qwen2-MoE (transformers, modeling_qwen2_moe.py): Qwen2 with experts, one used by every token."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_sparse_layers,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import GATED_EXPERTS, STACKED, read_experts
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen2MoeConfig. Windows, where they are switched on, are in every other layer."""
    config = read_decoder(fields, n_kv_heads=16, max_positions=32768)
    config = replace(
        config,
        attention_bias=fields.take("qkv_bias", bool, True),
        windows=_read_windows(fields, config.n_layers),
    )
    layers = read_sparse_layers(fields, config.n_layers)
    return read_experts(fields, config, layers, counts=(60, 4), inner=1408, shared=5632)


def _read_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """Read the windows. A `sliding_window` that is switched off may be 0."""
    window = fields.take("sliding_window", int, None if fields.given("sliding_window") else 4096)
    most = fields.take("max_window_layers", int, 28)
    is_used = fields.take("use_sliding_window", bool, False)
    if is_used and window is not None and window < 1:
        raise fields.damaged(f"sliding_window is {window}, expected 1 or more")
    window = window if is_used else None
    return read_windows(
        fields,
        n_layers,
        window,
        lambda layer: window is not None and layer % 2 == 0 and layer < most,
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata. Old files do not say how wide experts are; llama.cpp takes the same."""
    config = read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)
    inner, top_k = config["intermediate_size"], config["num_experts_per_tok"]
    return config | {
        "moe_intermediate_size": fields.positive("expert_feed_forward_length", inner // top_k),
        "shared_expert_intermediate_size": fields.positive(
            "expert_shared_feed_forward_length", inner
        ),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, False),
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
    }


FAMILY = record(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    read_config,
    Layout(attention=attention_part(has_output_bias=False), mlp=GATED_EXPERTS),
    **STACKED,
    gguf=GgufFormat(architecture="qwen2moe", read=read_gguf),
    pretokenizer="qwen2",
)
