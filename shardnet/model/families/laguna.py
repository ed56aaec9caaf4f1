"""Laguna (transformers, modeling_laguna.py): a gate for each head, whose softplus multiplies it.

Layers with a window may have more heads of queries, and turn otherwise. DeepSeek-V3's experts, in
no groups, beside one that is shared.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_expert_counts,
    read_mlp_kinds,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import gemma4
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED, with_experts
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table, attention, head_norms, linears

if TYPE_CHECKING:
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.mixed_attention import GatedAttention

_GATE: Final = "g_proj"
_ROPES: Final[dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}

_read_rope = partial(gemma4.read_rope, ropes=_ROPES, may_be_partial=True)


def _covers(fields: Fields) -> bool:
    """Whether each head has one gate, and the logits of routers have no cap."""
    gating = fields.take("gating", (bool, str), True)
    cap = fields.take("moe_router_logit_softcapping", float, 0.0)
    return gating in (True, "per-head") and cap == 0


def _read_config(fields: Fields) -> ModelConfig:
    """Read a LagunaConfig."""
    fields.require("moe_apply_router_weight_on_input", only=False)
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        head_size=128,
        intermediate_size=8192,
        rope=partial(_read_rope, FULL),
    )
    window = fields.positive("sliding_window", 512)
    query_heads = _read_query_heads(fields, config)
    config = replace(
        config,
        n_heads=max(query_heads),
        query_heads=query_heads,
        windows=read_windows(fields, config.n_layers, window, lambda _: False),
        local_rope=_read_rope(SLIDING, fields, config.max_positions, config.head_size),
    )
    return with_experts(
        config,
        *read_expert_counts(fields, ("num_experts", "num_local_experts"), 256, 8),
        intermediate_size=fields.positive("moe_intermediate_size", 512),
        shared_intermediate_size=fields.positive("shared_expert_intermediate_size", 512),
        output_scale=fields.number("moe_routed_scaling_factor", 1.0),
        layers=read_mlp_kinds(fields, config.n_layers, 1),
    )


def _read_query_heads(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """Read how many heads of queries each layer has."""
    usual = [config.n_heads] * config.n_layers
    each: list[Any] = fields.take("num_attention_heads_per_layer", list, usual)
    are_counts = all(type(n) is int and n > 0 and n % config.n_kv_heads == 0 for n in each)
    if len(each) != config.n_layers or not are_counts or max(each) > 4 * config.n_heads:
        raise fields.damaged(
            f"num_attention_heads_per_layer is {each}, expected {config.n_layers} multiples of "
            f"num_key_value_heads, {config.n_kv_heads}"
        )
    return tuple(each)


def _of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Return a config with the heads of one layer."""
    return replace(config, n_heads=config.query_heads[layer])


def _attention(config: ModelConfig, layer: int) -> Table:
    """Name Qwen3's attention, and the linear of its gates."""
    own = _of_layer(config, layer)
    gate = linears(f"model.layers.{layer}.self_attn", {_GATE: (own.n_heads, own.hidden_size)})
    return attention(own, layer) | head_norms(own, layer) | gate


def attention_part(*, gates_soft: bool) -> Part:
    """Make the part of an attention whose gates are softpluses, or sigmoids."""

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> GatedAttention:
        from shardnet.model.mixers.mixed_attention import GatedAttention

        plain = GatedAttention.load(_of_layer(config, layer), weights, layer, 1, _GATE)
        return replace(plain, gates_soft=gates_soft)

    return Part(tensors=_attention, load=load)


FAMILY = record(
    "laguna",
    "LagunaForCausalLM",
    _read_config,
    Layout(attention=attention_part(gates_soft=True), mlp=DEEPSEEK_EXPERTS),
    covers=_covers,
    renamed_tensors=(
        (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (".mlp.shared_expert.", ".mlp.shared_experts."),
    ),
    **STACKED,
    has_whole_heads=True,
)
