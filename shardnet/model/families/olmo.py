"""OLMo-2, OLMo-3 and those with experts (transformers, modeling_olmo2.py and others).

Norms are over all queries, and stand behind sub-layers but for OLMoE, which has Qwen3-MoE's
experts. OLMo-3 has sliding windows in three of four layers, and scaled rotary positions in the
others alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_expert_counts,
    read_full_rope,
    read_sliding_rope,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families.expert_parts import SOFTMAX_EXPERTS, STACKED, with_experts
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import WHOLE_HEADS

_THETA: Final = 500000.0


LAYOUT: Final = Layout(attention=WHOLE_HEADS, norms=POST_NORMS)


def _read_olmo3(fields: Fields) -> ModelConfig:
    """Read an Olmo3Config."""
    config = read_decoder(fields, norm_eps=1e-5, rope=partial(read_full_rope, theta=_THETA))
    window = read_window(fields, 4096)
    theta = fields.number("rope_theta", _THETA, within=THETAS)
    return replace(
        config,
        windows=read_windows(fields, config.n_layers, window, lambda n: (n + 1) % 4 != 0),
        local_rope=read_sliding_rope(fields, config, theta=theta),
    )


def _read_olmo3_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of a file with sliding windows; llama.cpp fixes which layers have them."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.positive("attention.sliding_window")
    config = read_gguf_decoder(fields)
    fields.require("rope.freq_base_swa", config["rope_theta"])
    return config | {"sliding_window": window}


def _read_olmoe(fields: Fields) -> ModelConfig:
    """Read an OlmoeConfig: experts in every layer, each as wide as `intermediate_size`."""
    config = read_decoder(fields, max_positions=4096, norm_eps=1e-5, intermediate_size=2048)
    clip = fields.optional_number("clip_qkv")
    if clip is not None:
        raise fields.unsupported("clip_qkv", clip, "null")
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 64, 8)
    normalizes = fields.take("norm_topk_prob", bool, False)
    return with_experts(config, n_experts, top_k, normalize_top_k=normalizes)


def _read_olmoe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_decoder(fields) | read_gguf_experts(fields)


def _read_flex_olmo(fields: Fields) -> ModelConfig:
    rope = partial(read_rope, theta=500000.0)
    config = read_decoder(fields, max_positions=4096, rope=rope)
    counts = read_expert_counts(fields, ("num_experts", "num_local_experts"), 7, 5)
    normalizes = fields.take("norm_topk_prob", bool, False)
    return with_experts(config, *counts, normalize_top_k=normalizes)


FAMILIES: Final = (
    record(
        "olmo2",
        "Olmo2ForCausalLM",
        partial(read_decoder, norm_eps=1e-5),
        LAYOUT,
        gguf=GgufFormat(
            architecture="olmo2", claims=lambda fields: not fields.given("attention.sliding_window")
        ),
        has_whole_heads=True,
    ),
    record(
        "olmo3",
        "Olmo3ForCausalLM",
        _read_olmo3,
        LAYOUT,
        gguf=GgufFormat(
            architecture="olmo2",
            claims=lambda fields: fields.given("attention.sliding_window"),
            read=_read_olmo3_gguf,
        ),
        has_whole_heads=True,
    ),
    record(
        "olmoe",
        "OlmoeForCausalLM",
        _read_olmoe,
        Layout(attention=WHOLE_HEADS, mlp=SOFTMAX_EXPERTS),
        **STACKED,
        gguf=GgufFormat(architecture="olmoe", read=_read_olmoe_gguf),
        has_whole_heads=True,
    ),
    record(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        _read_flex_olmo,
        Layout(attention=WHOLE_HEADS, mlp=SOFTMAX_EXPERTS, norms=POST_NORMS),
        has_whole_heads=True,
        **STACKED,
    ),
)
