"""Hunyuan 3, Hy3 (transformers, modeling_hy_v3.py): Qwen3's attention, DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_mlp_kinds,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families.afmoe import ROUTER_NAMES, read_experts
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.layout import Layout, record


def _read_config(fields: Fields) -> ModelConfig:
    """Read a HYV3Config, with the published keys that transformers goes without."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=13312,
        rope=partial(read_rope, theta=11158840.0),
    )
    for key in ("route_norm", "qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.require(key, only=True)
    for what in ("moe_fp32_combine", "attention_fp32_softmax", "lm_head_fp32"):
        fields.ignore(f"enable_{what}")  # how exactly half precision is computed
    fields.ignore("use_grouped_mm", "eod_token_id")
    inner = fields.positive("moe_intermediate_size", 1536)
    fields.require("expert_hidden_dim", inner)
    experts = read_experts(
        fields,
        read_mlp_kinds(fields, config.n_layers, fields.take("first_k_dense_replace", int, 1)),
        counts=(192, 8),
        inner=inner,
        n_shared=1,
        output_scale=fields.number("router_scaling_factor", 2.826),
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        has_head_norms=True,
        experts=experts,
    )


FAMILY = record(
    "hy_v3",
    "HYV3ForCausalLM",
    _read_config,
    Layout(mlp=DEEPSEEK_EXPERTS),
    renamed_tensors=(*ROUTER_NAMES, (".mlp.shared_mlp.", ".mlp.shared_experts.")),
    ignored_tensors=r"model\.layers\.80\..*",  # predicts further tokens
    **STACKED,
)
