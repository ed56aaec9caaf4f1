"""ERNIE 4.5 with experts (transformers, modeling_ernie4_5_moe.py): shared ones, a biased choice."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.limits import MAX_EXPERTS
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import llama_table
from shardnet.model.families.expert_parts import ERNIE_EXPERTS, STACKED
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record


def read_config(fields: Fields) -> ModelConfig:
    """Read an Ernie4_5_MoeConfig."""
    config = llama_table.read_ernie(fields, n_kv_heads=4, head_size=None)
    fields.ignore("moe_norm_min")  # what no sum of shares falls below
    fields.ignore("moe_capacity", "moe_gate", "moe_use_aux_free")  # of training
    n_experts = fields.positive("moe_num_experts", 64, at_most=MAX_EXPERTS)
    top_k = fields.positive("moe_k", 6, at_most=n_experts)
    inner = fields.positive("moe_intermediate_size", 1536)
    n_shared: int = fields.take("moe_num_shared_experts", int, 2)
    step = fields.positive("moe_layer_interval", 1)
    first: int = fields.take("moe_layer_start_index", int, 1)
    last: int = fields.take("moe_layer_end_index", int, -1)
    last = config.n_layers - 1 if last == -1 else last
    layers = tuple(n for n in range(config.n_layers) if first <= n <= last and (n + 1) % step == 0)
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=inner,
        normalize_top_k=True,
        shared_intermediate_size=inner * max(0, n_shared),
        layers=layers,
    )
    return replace(config, experts=experts if layers else None)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.ignore("expert_shared_feed_forward_length")  # follows from the others
    fields.require("expert_gating_func", 1)  # softmax
    return llama_table.read_ernie_gguf(fields, tensors, factors) | {
        "moe_num_experts": fields.positive("expert_count"),
        "moe_k": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "moe_num_shared_experts": fields.take("expert_shared_count", int, 0),
        "moe_layer_interval": fields.positive("interleave_moe_layer_step", 1),
        "moe_layer_start_index": fields.take("leading_dense_block_count", int, 0),
    }


FAMILY = record(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    read_config,
    Layout(mlp=ERNIE_EXPERTS),
    ignored_tensors=r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\..*",
    **STACKED,
    gguf=GgufFormat(
        architecture="ernie4_5-moe",
        read=read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
)
