"""LFM2 with experts (transformers, modeling_lfm2_moe.py), chosen by sigmoid and a bias."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import lfm2
from shardnet.model.families.expert_parts import LFM
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import record

if TYPE_CHECKING:
    pass


def read_config(fields: Fields) -> ModelConfig:
    """Read an Lfm2MoeConfig: the first layers have a dense MLP."""
    config = lfm2.read_hybrid(fields, intermediate_size=7168)
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 32, 4)
    first = fields.take("num_dense_layers", int, 2)
    fields.require("use_expert_bias", True)
    return replace(
        config,
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=fields.positive("moe_intermediate_size", 1792),
            normalize_top_k=fields.take("norm_topk_prob", bool, True),
            output_scale=fields.number("routed_scaling_factor", 1.0),
            layers=tuple(range(max(0, first), config.n_layers)),
        ),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return lfm2.read_gguf(fields, tensors, factors) | {
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "num_dense_layers": fields.take("leading_dense_block_count", int, 0),
    }


FAMILY = record(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    read_config,
    lfm2.LAYOUT,
    experts=LFM,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="lfm2moe", read=read_gguf, renamed=(("expert_bias", "expert_bias.bias"),)
    ),
)
