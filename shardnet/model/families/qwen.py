"""Qwen2 and Qwen3, dense and with experts (transformers, modeling_qwen2.py and others).

Qwen2 has biases on queries, keys and values; Qwen3 a norm over each head of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_sparse_layers,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import (
    GATED_EXPERTS,
    SOFTMAX_EXPERTS,
    STACKED,
    read_experts,
)
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part


def _read_qwen2(fields: Fields) -> ModelConfig:
    """Read a Qwen2Config."""
    config = read_decoder(fields, n_kv_heads=32, max_positions=32768, attention_bias=None)
    return replace(config, attention_bias=True, windows=_read_windows(fields, config.n_layers))


def _read_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """Read Qwen's windows: switched off as a rule, else in the layers from a number on."""
    is_used = fields.take("use_sliding_window", bool, False)
    window = read_window(fields, 4096)
    first = fields.take("max_window_layers", int, 28)
    window = window if is_used else None
    return read_windows(fields, n_layers, window, lambda n: window is not None and n >= first)


def _read_qwen3(fields: Fields) -> ModelConfig:
    """Read a Qwen3Config."""
    config = read_decoder(fields, n_kv_heads=32, max_positions=32768, head_size=128)
    windows = _read_windows(fields, config.n_layers)
    return replace(config, has_head_norms=True, windows=windows)


def _read_qwen2_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen2MoeConfig. Windows, where they are switched on, are in every other layer."""
    config = read_decoder(fields, n_kv_heads=16, max_positions=32768, attention_bias=None)
    config = replace(
        config,
        attention_bias=fields.take("qkv_bias", bool, True),
        windows=_read_alternate_windows(fields, config.n_layers),
    )
    layers = read_sparse_layers(fields, config.n_layers)
    return read_experts(fields, config, layers, counts=(60, 4), inner=1408, shared=5632)


def _read_alternate_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
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


def _read_qwen2_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. Old files do not say how wide experts are; llama.cpp takes the same."""
    config = read_gguf_decoder(fields) | read_gguf_experts(fields)
    inner, top_k = config["intermediate_size"], config["num_experts_per_tok"]
    return config | {
        "moe_intermediate_size": fields.positive("expert_feed_forward_length", inner // top_k),
        "shared_expert_intermediate_size": fields.positive(
            "expert_shared_feed_forward_length", inner
        ),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, False),
        "qkv_bias": "blk.0.attn_q.bias" in fields.tensors,
    }


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen3MoeConfig. A window that is switched on is in all layers, unlike Qwen3's."""
    config = read_decoder(fields, n_kv_heads=4, max_positions=32768)
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


def _read_qwen3_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_shared_feed_forward_length", 0)
    config = read_gguf_decoder(fields) | read_gguf_experts(fields)
    return config | {
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
    }


FAMILIES: Final = (
    record(
        "qwen2",
        "Qwen2ForCausalLM",
        _read_qwen2,
        Layout(attention=attention_part(has_output_bias=False)),
        gguf=GgufFormat(architecture="qwen2", multimodal=("qwen2vl",)),
        pretokenizer="qwen2",
    ),
    record(
        "qwen3",
        "Qwen3ForCausalLM",
        _read_qwen3,
        gguf=GgufFormat(architecture="qwen3", multimodal=("qwen3vl",)),
        pretokenizer="qwen2",
    ),
    record(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _read_qwen2_moe,
        Layout(attention=attention_part(has_output_bias=False), mlp=GATED_EXPERTS),
        **STACKED,
        gguf=GgufFormat(architecture="qwen2moe", read=_read_qwen2_moe_gguf),
        pretokenizer="qwen2",
    ),
    record(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _read_qwen3_moe,
        Layout(mlp=SOFTMAX_EXPERTS),
        **STACKED,
        gguf=GgufFormat(
            architecture="qwen3moe", multimodal=("qwen3vlmoe",), read=_read_qwen3_moe_gguf
        ),
        pretokenizer="qwen2",
    ),
)
