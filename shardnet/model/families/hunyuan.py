"""Hunyuan's families (transformers, modeling_hunyuan_v1_dense.py, _hunyuan_v1_moe.py, _hy_v3.py).

Heads are normed rotated in the first two. Hunyuan 3 has Qwen3's attention, DeepSeek-V3's experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts, read_mlp_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families.afmoe import ROUTER_NAMES
from shardnet.model.families.expert_parts import (
    DEEPSEEK_EXPERTS,
    HUNYUAN_EXPERTS,
    STACKED,
    with_experts,
)
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part

_OF_YARN = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")


def _read_dense(fields: Fields) -> ModelConfig:
    """Read a HunYuanDenseV1Config."""
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        fields.require(key, only=True)
    for key in ("mlp_bias", "use_cla", "position_embedding_xdrope", "add_classification_head"):
        fields.require(key, only=False)
    fields.ignore("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "norm_type")
    fields.ignore("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id")
    fields.ignore("mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id")
    fields.ignore("text_start_id", "sep_token_id")
    config = read_decoder(fields, norm_eps=1e-5, rope=_read_rope)
    return replace(config, has_head_norms=True)


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions, whose base `alpha` stretches; what stands beside it changes nothing."""
    inner = rope_object(fields)
    alpha = inner.optional_number("alpha")
    kind = inner.take("rope_type", str, inner.take("type", str, "default"))
    if alpha is None or kind != "dynamic":
        return read_rope(fields, max_positions, head_size)
    theta = inner.number(
        "rope_theta", fields.number("rope_theta", 10000.0, within=THETAS), within=THETAS
    )
    inner.ignore(*_OF_YARN)
    inner.note_the_rest()
    return Rope(theta=theta * alpha ** (head_size / (head_size - 2)))


_HEADS: Final = attention_part(norms=("query_layernorm", "key_layernorm"), norms_rotated=True)
"""Attention whose heads are normed behind the rotation."""


def _read_hunyuan_moe(fields: Fields) -> ModelConfig:
    """Read a HunYuanMoEV1Config; published ones say of each layer what is the same in all."""
    config = _read_dense(fields)
    for key in ("use_mla", "group_limited_greedy", "moe_drop_tokens"):
        fields.require(key, only=False)
    fields.require("moe_layer_num_skipped", 0)
    fields.ignore("capacity_factor", "moe_random_routing_dropped_token", "use_mixed_mlp_moe")
    fields.ignore("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    fields.ignore("v_head_dim", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    n_experts = _one_for_all(fields, "num_experts", 1)
    top_k = _one_for_all(fields, "moe_topk", 1)
    if _one_for_all(fields, "num_shared_expert", 1) != 1:
        raise fields.unsupported("num_shared_expert", "another", "1")
    inner = _one_for_all(fields, "moe_intermediate_size", config.intermediate_size)
    if inner != config.intermediate_size:
        raise fields.unsupported("moe_intermediate_size", inner, str(config.intermediate_size))
    if not 1 <= top_k <= n_experts:
        raise fields.damaged(f"moe_topk is {top_k}, there are {n_experts} experts")
    return with_experts(config, n_experts, top_k, shared_intermediate_size=config.intermediate_size)


def _one_for_all(fields: Fields, key: str, default: int) -> int:
    """Take one number, or a list that has the same for each layer."""
    value = fields.take(key, (int, list), default)
    each: list[int] = value if isinstance(value, list) else [value]
    is_count = all(type(one) is int and one > 0 for one in each)
    if not is_count or len(found := set(each)) != 1:
        raise fields.unsupported(key, value, "one number above 0 in all layers")
    return found.pop()


def _read_hunyuan_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    config = read_gguf_decoder(fields)
    fields.require("expert_gating_func", 1)  # softmax
    inner = fields.positive("expert_feed_forward_length", config["intermediate_size"])
    fields.require("expert_shared_feed_forward_length", inner)
    fields.require("expert_shared_count", 1)
    return config | {
        "intermediate_size": inner,
        "num_experts": fields.positive("expert_count"),
        "moe_topk": fields.positive("expert_used_count"),
    }


def _read_hy_v3(fields: Fields) -> ModelConfig:
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
    first = fields.take("first_k_dense_replace", int, 1)
    return with_experts(
        replace(config, mlp_bias=fields.take("mlp_bias", bool, False), has_head_norms=True),
        *read_expert_counts(fields, ("num_experts", "num_local_experts"), 192, 8),
        intermediate_size=inner,
        shared_intermediate_size=inner * fields.positive("num_shared_experts", 1),
        output_scale=fields.number("router_scaling_factor", 2.826),
        layers=read_mlp_kinds(fields, config.n_layers, first),
    )


FAMILIES: Final = (
    record(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        _read_dense,
        Layout(attention=_HEADS),
        gguf=GgufFormat(architecture="hunyuan-dense"),
    ),
    record(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _read_hunyuan_moe,
        Layout(attention=_HEADS, mlp=HUNYUAN_EXPERTS),
        renamed_tensors=((".mlp.gate.wg.", ".mlp.gate."),),
        gguf=GgufFormat(architecture="hunyuan-moe", read=_read_hunyuan_moe_gguf),
        **STACKED,
    ),
    record(
        "hy_v3",
        "HYV3ForCausalLM",
        _read_hy_v3,
        Layout(mlp=DEEPSEEK_EXPERTS),
        renamed_tensors=(*ROUTER_NAMES, (".mlp.shared_mlp.", ".mlp.shared_experts.")),
        ignored_tensors=r"model\.layers\.80\..*",  # predicts further tokens
        **STACKED,
    ),
)
