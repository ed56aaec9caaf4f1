"""MiniMax-M2 (transformers, modeling_minimax_m2.py): OLMo-2's norms, heads half rotated, experts.

Experts are named as Mixtral's and chosen as DeepSeek-V3's, without groups and shared ones.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families.deepseek_v2 import require_text
from shardnet.model.families.expert_parts import MINIMAX_EXPERTS, MIXTRAL, in_all_layers
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import WHOLE_HEADS


def read_config(fields: Fields) -> ModelConfig:
    """Read a MiniMaxM2Config, with the published keys that transformers goes without."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=196608,
        head_size=128,
        intermediate_size=1536,
        rope=_read_rope,
    )
    require_text(fields, "qk_norm_type", "per_layer")
    require_text(fields, "scoring_func", "sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        fields.require(key, only=True)
    for part in ("full_attention", "linear_attention", "mlp"):
        fields.require(f"layernorm_{part}_beta", 1.0)
    fields.require("shared_intermediate_size", 0)
    fields.ignore("mlp_intermediate_size", "shared_moe_mode")  # of parts that it has none of
    fields.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    kinds = fields.take("attn_type_list", list, [])
    if any(kind != 1 for kind in kinds):
        raise fields.unsupported("attn_type_list", kinds, "[1, 1, …]")
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 256, 8)
    windows = (fields.optional("sliding_window"),) * config.n_layers
    return in_all_layers(replace(config, windows=windows), n_experts, top_k)


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    rotated = fields.positive("rotary_dim", head_size)
    read = partial(read_rope, may_be_partial=True, theta=5000000.0, share=rotated / head_size)
    return read(fields, max_positions, head_size)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return read_gguf_decoder(fields, tensors, factors) | {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "intermediate_size": fields.positive("expert_feed_forward_length"),
    }


FAMILY = record(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    read_config,
    Layout(attention=WHOLE_HEADS, mlp=MINIMAX_EXPERTS),
    experts=MIXTRAL,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="minimax-m2",
        read=read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
    has_whole_heads=True,
)
