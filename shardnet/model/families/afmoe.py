"""AFMoE, Arcee's Trinity (transformers, modeling_afmoe.py): attention with a gate of its own.

Layers without a window have no positions. Four norms a layer, DeepSeek-V3's experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_expert_counts,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED, with_experts
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import WIDELY_GATED_HEADS

ROUTER_NAMES: Final = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read an AfmoeConfig, with the published keys that transformers goes without."""
    config = read_decoder(
        fields, max_positions=16384, norm_eps=1e-5, head_size=128, intermediate_size=6144
    )
    fields.require("score_func", "sigmoid")
    fields.require("route_norm", only=True)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        fields.require(key, 1)
    fields.ignore("load_balance_coeff", "use_grouped_mm")  # of training; how others compute it
    window, period = read_window(fields, 1024), fields.positive("global_attn_every_n_layers", 4)
    windows = read_windows(fields, config.n_layers, window, lambda n: (n + 1) % period != 0)
    is_multiplied = fields.take("mup_enabled", bool, False)
    config = replace(
        config,
        windows=windows,
        nope_layers=tuple(n for n in range(config.n_layers) if windows[n] is None),
        embedding_multiplier=config.hidden_size**0.5 if is_multiplied else 1.0,
    )
    first = max(0, fields.take("num_dense_layers", int, 1))
    inner = fields.positive("moe_intermediate_size", 1408)
    return with_experts(
        config,
        *read_expert_counts(fields, ("num_experts", "num_local_experts"), 64, 6),
        intermediate_size=inner,
        shared_intermediate_size=inner * fields.positive("num_shared_experts", 2),
        output_scale=fields.number("route_scale", 1.0),
        layers=tuple(range(first, config.n_layers)),
    )


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; embeddings are multiplied, and every fourth layer is without a window."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return read_gguf_decoder(fields) | {
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "mup_enabled": True,
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "num_dense_layers": fields.take("leading_dense_block_count", int, 0),
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "num_shared_experts": fields.positive("expert_shared_count"),
        "n_group": fields.positive("expert_group_count", 1),
        "topk_group": fields.positive("expert_group_used_count", 1),
        "route_norm": fields.take("expert_weights_norm", bool, True),
        "route_scale": fields.number("expert_weights_scale", 1.0),
        "sliding_window": fields.positive("attention.sliding_window"),
    }


FAMILY = record(
    "afmoe",
    "AfmoeForCausalLM",
    _read_config,
    Layout(
        attention=WIDELY_GATED_HEADS,
        mlp=DEEPSEEK_EXPERTS,
        norms=(
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_mlp_layernorm", "post_mlp_layernorm"),
        ),
    ),
    renamed_tensors=ROUTER_NAMES,
    **STACKED,
    gguf=GgufFormat(
        architecture="afmoe",
        read=_read_gguf,
        renamed=(
            (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias.bias"),
            (".mlp.gate.", ".mlp.router.gate."),
        ),
    ),
)
