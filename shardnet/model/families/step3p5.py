"""Step 3.5 and 3.7 (transformers, modeling_step3p7.py): Laguna's attention, with sigmoids as gates.

Layers with a window have more heads of queries. DeepSeek-V3's experts; in some layers MLPs are
clamped behind the activation. What makers say layer by layer is read as transformers saves it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_expert_counts,
    read_mlp_kinds,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS, THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import gemma4, laguna
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED, with_experts
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part

if TYPE_CHECKING:
    from shardnet.model.layers.experts import LateClampedMlp, SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

_SAME: Final = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Other names of keys, which count where the keys themselves are missing."""
_LIMITS: Final = ("swiglu_limits", "swiglu_limits_shared")
"""What clamps the experts of each layer, and the shared one."""
_EACH: Final = (
    *("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors"),
    *_LIMITS,
)
"""Lists by layer, which may go on with layers that predict further tokens."""
_ONLY: Final = {
    **dict.fromkeys(("use_moe_router_bias", "norm_expert_weight", "use_qk_norm"), True),
    **dict.fromkeys(("use_head_wise_attn_gate", "zero_centered"), True),
    "sink": False,
}
_UNUSED: Final = (
    *("att_impl_type", "hidden_act", "moe_every_n_layer", "moe_layer_offset", "need_fp32_gate"),
    *("use_moe", "use_rope_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
)
"""Keys of the makers that say nothing beside others, and those of layers that are not run."""


def _read_config(given: Fields) -> ModelConfig:
    """Read a Step3p7TextConfig, or what its makers publish."""
    fields = _read_names(given)
    for key, only in _ONLY.items():
        fields.require(key, only)
    fields.require("moe_router_activation", "sigmoid")
    fields.one_of("yarn_only_types", ([FULL],), [FULL])
    if (gating := fields.take("gating", (bool, str), True)) not in (True, "per-head"):
        raise fields.unsupported("gating", gating, "true, per-head")
    fields.ignore(*_UNUSED)
    ropes = _read_ropes(fields)
    read_rope = partial(gemma4.read_rope, ropes=ropes, may_be_partial=True)
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=128000,
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=11264,
        activation_key=None,
        mlp_bias=False,
        rope=partial(read_rope, FULL),
    )
    windows = read_windows(
        fields, config.n_layers, fields.optional("sliding_window"), lambda _: False
    )
    query_heads = _read_query_heads(fields, config, windows)
    limits = [_read_each(fields, key, config.n_layers, 0.0) for key in _LIMITS]
    config = replace(
        config,
        n_heads=max(query_heads),
        query_heads=query_heads,
        windows=windows,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", float(config.head_size)) ** -0.5,
        local_rope=read_rope(SLIDING, fields, config.max_positions, config.head_size)
        if any(windows)
        else None,
        late_limits=tuple(zip(*limits, strict=True)),
    )
    config = _read_experts(fields, config)
    fields.note_the_rest()
    return config


def _read_names(given: Fields) -> Fields:
    """Call keys as transformers does, and cut lists behind the last layer."""
    raw = given.take_the_rest() | {"model_type": "step3p5"}
    for published, own in _SAME.items():
        if (value := raw.pop(published, None)) is not None:
            raw.setdefault(own, value)
    n_layers, n_ahead = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    if type(n_layers) is int and type(n_ahead) is int:
        for key in _EACH:
            if isinstance(each := raw.get(key), list) and len(each) == n_layers + n_ahead:
                raw[key] = each[:n_layers]
    return Fields(raw, given.where, unknown=given.unknown)


def _read_each(fields: Fields, key: str, n_layers: int, usual: float) -> list[float]:
    """Read a number for each layer, or one for all; null is 0."""
    value = fields.take(key, (list, int, float), usual)
    each = [one or 0.0 for one in value] if isinstance(value, list) else [value] * n_layers
    if len(each) != n_layers or not all(
        type(one) in (int, float) and 0 <= one <= THETAS.most for one in each
    ):
        raise fields.damaged(f"{key} is {shown(value)}, expected {n_layers} numbers")
    return [float(one) for one in each]


def _read_ropes(fields: Fields) -> dict[str, Any]:
    """Read the rotary positions of each kind of layers where they stand by layer."""
    n_layers = fields.positive("num_hidden_layers", at_most=MAX_LAYERS)
    kinds = fields.take("layer_types", list, [FULL] * n_layers)
    thetas = _read_each(fields, "rope_theta", n_layers, 1e4)
    shares = _read_each(fields, "partial_rotary_factors", n_layers, 1.0)
    scaling: dict[str, Any] = fields.take("rope_scaling", dict, {})
    ropes: dict[str, Any] = {}
    for kind in (FULL, SLIDING):
        layers = zip(kinds, thetas, shares, strict=False)
        own = {(theta, share) for of, theta, share in layers if of == kind} or {(1e4, 1.0)}
        if len(own) > 1:
            raise fields.unsupported("rope_theta", thetas, "the same in all layers of a kind")
        [(theta, share)] = own
        rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        ropes[kind] = rope | (scaling if kind == FULL else {})
    return ropes


def _read_query_heads(
    fields: Fields, config: ModelConfig, windows: tuple[int | None, ...]
) -> tuple[int, ...]:
    """Read how many heads of queries each layer has."""
    other = fields.inner(
        "attention_other_setting", fields.take("attention_other_setting", dict, {})
    )
    other.require("num_attention_groups", config.n_kv_heads)
    other.require("head_dim", config.head_size)
    n_other = other.positive("num_attention_heads", config.n_heads)
    n_local = fields.positive("num_sliding_attention_heads", n_other)
    other.ignore("attention_type", "true_head_dim")
    other.note_the_rest()
    if n_local % config.n_kv_heads or n_local > 4 * config.n_heads:
        raise fields.damaged(f"{n_local} heads look back, at {config.n_kv_heads} of keys")
    own = {str(n): {"num_attention_heads": n_local} for n, window in enumerate(windows) if window}
    said = fields.take("per_layer_config", dict, own)
    if {str(layer).lstrip("0") or "0": said[layer] for layer in said} != own:
        raise fields.unsupported("per_layer_config", said, "num_sliding_attention_heads")
    return tuple(n_local if window else config.n_heads for window in windows)


def _read_experts(fields: Fields, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers
    named = fields.take("moe_layers_enum", (str, list), None)
    layers = read_mlp_kinds(fields, n_layers, 3)
    if named is not None and fields.missing("mlp_layer_types"):
        numbers = {str(n).strip() for n in (named.split(",") if isinstance(named, str) else named)}
        layers = tuple(n for n in range(n_layers) if str(n) in numbers)
    return with_experts(
        config,
        *read_expert_counts(fields, ("n_routed_experts", "num_local_experts"), 288, 8),
        intermediate_size=fields.positive("moe_intermediate_size", 1280),
        shared_intermediate_size=fields.positive("share_expert_dim", 1280),
        output_scale=fields.number("moe_router_scaling_factor", 1.0),
        layers=layers,
    )


def _load_mlp(
    config: ModelConfig, weights: WeightSource, layer: int
) -> GatedMlp | LateClampedMlp | SparseMlp:
    from shardnet.model.layers.modules import GatedMlp

    made: GatedMlp | SparseMlp = DEEPSEEK_EXPERTS.load(config, weights, layer)
    routed, shared = config.late_limits[layer]
    if isinstance(made, GatedMlp):
        return _clamped(made, shared)
    assert isinstance(made.shared, GatedMlp)
    experts = [_clamped(one, routed) for one in made.experts if isinstance(one, GatedMlp)]
    return replace(made, experts=experts, shared=_clamped(made.shared, shared))


def _clamped(plain: GatedMlp, limit: float) -> GatedMlp | LateClampedMlp:
    from shardnet.model.layers.experts import LateClampedMlp

    if not limit:
        return plain
    return LateClampedMlp(limit=limit, gate_up_proj=plain.gate_up_proj, down_proj=plain.down_proj)


FAMILY = record(
    "step3p5",
    "Step3p5ForCausalLM",
    _read_config,
    Layout(
        attention=laguna.attention_part(gates_soft=False),
        mlp=Part(tensors=DEEPSEEK_EXPERTS.tensors, load=_load_mlp),
    ),
    renamed_tensors=(
        (".moe.router_bias", ".moe.gate.e_score_correction_bias"),
        (".share_expert.", ".mlp.shared_experts."),
        (".moe.", ".mlp."),
    ),
    ignored_tensors=r"model\.layers\.(4[5-7]\.|\d+\.(enorm|hnorm|eh_proj|transformer)\.).*",
    **STACKED,
    has_whole_heads=True,
)
