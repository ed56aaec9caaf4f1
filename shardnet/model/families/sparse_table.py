"""Families with experts that are put together from shared parts: a reader and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from collections.abc import Container
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
from shardnet.model.config.gguf_keys import (
    Factors,
    gguf_biases,
    read_gguf_decoder,
    read_gguf_experts,
)
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import Experts, ModelConfig, NormKind, Rope
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families import (
    deepseek_v2,
    dense_table,
    gemma4,
    glm4_moe,
    granite,
    hunyuan_v1_dense,
    llama_table,
    mixtral,
    phi3,
)
from shardnet.model.families.expert_parts import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    HUNYUAN_EXPERTS,
    MIXTRAL,
    PHI_EXPERTS,
    SOFTMAX_EXPERTS,
    STACKED,
    UNBIASED_EXPERTS,
    in_all_layers,
    read_experts,
)
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import WHOLE_HEADS, Part, attention_part
from shardnet.model.families.tensor_shapes import Table, gated, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

_MELLUM_ROPES: Final[dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_RENAMED_BIAS: Final = (("correction_bias", "correction.bias"),)


# Granite

_SHARED: Final = ("input_linear", "input_linear", "output_linear")


def read_granite_moe(fields: Fields) -> ModelConfig:
    """Read a GraniteMoeConfig, with a shared expert or without."""
    config = granite.read_config(fields)
    counts = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    shared: int = fields.take("shared_intermediate_size", int, 0)
    return in_all_layers(config, *counts, shared_intermediate_size=max(0, shared))


def _granite_mlp(config: ModelConfig, layer: int) -> Table:
    """Name a router, its experts and a shared one, whose gate and up are one linear.

    A model without experts has the last alone, as wide as its MLP.
    """
    own = config.experts
    inner = config.intermediate_size if own is None else own.shared_intermediate_size
    prefix = f"model.layers.{layer}.shared_mlp"
    shared = gated(config, prefix, inner, names=_SHARED) if inner else {}
    return shared if own is None else sparse_mlp(config, layer, EXPERTS) | shared


def _load_granite_mlp(
    config: ModelConfig, weights: WeightSource, layer: int
) -> SparseMlp | GatedMlp:
    from shardnet.model.layers.modules import GatedMlp

    own, prefix = config.experts, f"model.layers.{layer}.shared_mlp"
    if own is not None:
        alone = replace(config, experts=replace(own, shared_intermediate_size=0))
        sparse: SparseMlp = SOFTMAX_EXPERTS.load(alone, weights, layer)
        if not own.shared_intermediate_size:
            return sparse
    shared = GatedMlp.load(config, weights, prefix, _SHARED)
    return shared if own is None else replace(sparse, shared=shared)


def _read_granite_moe_gguf(
    fields: Fields, tensors: Container[str], factors: Factors
) -> dict[str, Any]:
    """Read the metadata; experts are as wide as the MLP would be."""
    config = granite.read_gguf(fields, tensors, factors) | read_gguf_experts(fields)
    shared = fields.take("expert_shared_feed_forward_length", int, 0)
    return config | {"shared_intermediate_size": shared}


GRANITE_MLP: Final = Part(tensors=_granite_mlp, load=_load_granite_mlp)
GRANITE_NAMES: Final = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
)


# Mellum

_read_mellum_rope = partial(gemma4.read_rope, ropes=_MELLUM_ROPES)


def _read_mellum(fields: Fields) -> ModelConfig:
    """Read a MellumConfig: Qwen3-MoE with windows, whose layers turn by a base of their own."""
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=131072,
        head_size=128,
        intermediate_size=7168,
        rope=partial(_read_mellum_rope, FULL),
    )
    fields.ignore("mtp_layer_types", "mtp_mlp_layer_types")  # of a layer that is not used
    window = fields.take("sliding_window", int, 1024)
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        has_head_norms=True,
        windows=read_windows(fields, config.n_layers, window, lambda _: False),
        local_rope=_read_mellum_rope(SLIDING, fields, config.max_positions, config.head_size),
    )
    layers = read_mlp_kinds(fields, config.n_layers, 0)
    return read_experts(fields, config, layers, counts=(64, 8), inner=896, sums=True)


# Phi


def _read_phimoe(fields: Fields) -> ModelConfig:
    """Read a PhimoeConfig: two experts, and the second is chosen without the first."""
    fields.require("router_jitter_noise", 0.01)
    fields.ignore("input_jitter_noise")  # of training
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=_read_phimoe_rope
    )
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 16, 2)
    fields.require("num_experts_per_tok", 2)
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        has_head_bias=fields.take("lm_head_bias", bool, False),
        windows=(fields.optional("sliding_window"),) * config.n_layers,
    )
    return in_all_layers(config, n_experts, top_k, normalize_top_k=False)


def _read_phimoe_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions, whose magnitude is said for short contexts and for long ones."""
    inner = rope_object(fields)
    short, long = (inner.optional_number(f"{name}_mscale") for name in ("short", "long"))
    if short != long:
        raise fields.unsupported("short_mscale", short, f"long_mscale, {long}")
    rope = read_rope(
        fields,
        max_positions,
        head_size,
        theta=1e6,
        ignored=("short_mscale", "long_mscale"),
        aliases={"su": "longrope"},
    )
    return rope if short is None else replace(rope, magnitude=short)


def _read_phimoe_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    config = phi3.read_gguf(fields, tensors, factors) | mixtral.read_gguf(fields, tensors, factors)
    bias = gguf_biases(tensors)["attention_bias"]
    return config | {"attention_bias": bias, "lm_head_bias": "output.bias" in tensors}


# Hunyuan


def _read_hunyuan_moe(fields: Fields) -> ModelConfig:
    """Read a HunYuanMoEV1Config; published ones say of each layer what is the same in all."""
    config = hunyuan_v1_dense.read_config(fields)
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
    return in_all_layers(
        config, n_experts, top_k, shared_intermediate_size=config.intermediate_size
    )


def _one_for_all(fields: Fields, key: str, default: int) -> int:
    """Take one number, or a list that has the same for each layer."""
    value = fields.take(key, (int, list), default)
    each: list[int] = value if isinstance(value, list) else [value]
    is_count = all(type(one) is int and one > 0 for one in each)
    if not is_count or len(found := set(each)) != 1:
        raise fields.unsupported(key, value, "one number above 0 in all layers")
    return found.pop()


def _read_hunyuan_moe_gguf(
    fields: Fields, tensors: Container[str], factors: Factors
) -> dict[str, Any]:
    config = read_gguf_decoder(fields, tensors, factors)
    fields.require("expert_gating_func", 1)  # softmax
    inner = fields.positive("expert_feed_forward_length", config["intermediate_size"])
    fields.require("expert_shared_feed_forward_length", inner)
    fields.require("expert_shared_count", 1)
    return config | {
        "intermediate_size": inner,
        "num_experts": fields.positive("expert_count"),
        "moe_topk": fields.positive("expert_used_count"),
    }


# DeepSeek-V3's experts, other attention


def _read_dots1(fields: Fields) -> ModelConfig:
    config = read_decoder(fields, n_kv_heads=32, intermediate_size=10944)
    deepseek_v2.require_text(fields, "scoring_func", "noaux_tc")
    fields.require("moe_layer_freq", 1)
    window, first = fields.optional("sliding_window"), fields.take("max_window_layers", int, 62)
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        has_head_norms=True,
        windows=read_windows(
            fields, config.n_layers, window, lambda n: window is not None and n >= first
        ),
    )
    return _read_sigmoid_experts(fields, config, n_experts=128, inner=1408, first=0, sums=False)


def _read_solar_open(fields: Fields) -> ModelConfig:
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=10240,
        attention_bias=False,
        rope=partial(read_rope, theta=1e6),
    )
    fields.require("use_qk_norm", False)
    return _read_sigmoid_experts(fields, config, n_experts=128, inner=1280, first=0, sums=True)


def _read_sigmoid_experts(
    fields: Fields, config: ModelConfig, *, n_experts: int, inner: int, first: int, sums: bool
) -> ModelConfig:
    """Add experts that are chosen by sigmoid and a bias; the arguments are defaults."""
    defaults = Experts(
        n_experts=n_experts,
        top_k=8,
        intermediate_size=inner,
        normalize_top_k=fields.take("norm_topk_prob", bool, sums),
        shared_intermediate_size=1,
        layers=(first,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def _read_dots1_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    config = glm4_moe.read_gguf(fields, tensors, factors)
    del config["use_qk_norm"]
    return config


def _read_exaone_moe(fields: Fields) -> ModelConfig:
    """Read an ExaoneMoeConfig: EXAONE 4's windows, norms before sub-layers."""
    config = replace(llama_table.read_exaone4(fields), has_head_norms=True)
    n_shared = fields.positive("num_shared_experts", 1)
    defaults = Experts(
        n_experts=64,
        top_k=8,
        intermediate_size=1024,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=n_shared,
        output_scale=2.5,
        layers=(1,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


# Cohere


def _read_cohere2_moe(fields: Fields) -> ModelConfig:
    """Read a Cohere2MoeConfig: what experts and shared ones give is averaged or added."""
    first = fields.take("first_k_dense_replace", int, 0)
    period = fields.positive("prefix_dense_sliding_window_pattern", 1)
    config = dense_table.read_cohere2(fields, max(0, first), period, head_size=128)
    layers = read_mlp_kinds(fields, config.n_layers, first)
    counts = read_expert_counts(fields, ("num_experts", "num_local_experts"), 8, 2)
    normalizes = fields.take("norm_topk_prob", bool, True)
    n_shared = fields.take("num_shared_experts", int, 0)
    strategy = fields.take("shared_expert_combination_strategy", str, "average")
    if strategy not in ("average", "sum"):
        raise fields.unsupported("shared_expert_combination_strategy", strategy, "average, sum")
    scoring = fields.take("expert_selection_fn", str, "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.unsupported("expert_selection_fn", scoring, "softmax, sigmoid")
    config = in_all_layers(
        config,
        *counts,
        has_softmax=scoring == "softmax",
        normalize_top_k=normalizes or scoring == "softmax",
        shared_intermediate_size=config.intermediate_size * max(0, n_shared),
        output_scale=0.5 if n_shared > 0 and strategy == "average" else 1.0,
        layers=layers,
    )
    if not layers:
        config = replace(config, experts=None)
    if not fields.missing("rms_norm_eps"):
        eps = fields.number("rms_norm_eps", within=NORM_EPS)
        config = replace(config, norm_eps=eps, norm_kind=NormKind.STORED)
    turning = () if period > 1 else {*range(config.n_layers)} - {*layers}
    return replace(
        config,
        intermediate_size=fields.positive(
            "prefix_dense_intermediate_size", config.intermediate_size
        ),
        nope_layers=tuple(layer for layer in config.nope_layers if layer not in turning),
    )


def _load_cohere2_mlp(
    config: ModelConfig, weights: WeightSource, layer: int
) -> SparseMlp | GatedMlp:
    """Take an MLP, or experts whose weights have a half in them where they are averaged."""
    from shardnet.model.kernels.linear import ScaledLinear
    from shardnet.model.layers.modules import GatedMlp

    made: SparseMlp | GatedMlp = UNBIASED_EXPERTS.load(config, weights, layer)
    if isinstance(made, GatedMlp) or not isinstance(made.shared, GatedMlp):
        return made
    assert config.experts is not None
    scale = (config.hidden_size, config.experts.output_scale)
    down = ScaledLinear.of(made.shared.down_proj, scale)
    return replace(made, shared=replace(made.shared, down_proj=down))


# OLMo


def _read_flex_olmo(fields: Fields) -> ModelConfig:
    rope = partial(read_rope, theta=500000.0)
    config = read_decoder(fields, max_positions=4096, attention_bias=False, rope=rope)
    counts = read_expert_counts(fields, ("num_experts", "num_local_experts"), 7, 5)
    normalizes = fields.take("norm_topk_prob", bool, False)
    return in_all_layers(config, *counts, normalize_top_k=normalizes)


FAMILIES: Final = (
    record(
        "granitemoe",
        "GraniteMoeForCausalLM",
        read_granite_moe,
        Layout(mlp=GRANITE_MLP),
        renamed_tensors=GRANITE_NAMES,
        gguf=GgufFormat(
            architecture="granitemoe",
            claims=lambda fields: not fields.given("expert_shared_feed_forward_length"),
            read=_read_granite_moe_gguf,
            interleaved_rotary=True,
        ),
        **STACKED,
    ),
    record(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        read_granite_moe,
        Layout(mlp=GRANITE_MLP),
        renamed_tensors=GRANITE_NAMES,
        gguf=GgufFormat(
            architecture="granitemoe",
            claims=lambda fields: fields.given("expert_shared_feed_forward_length"),
            read=_read_granite_moe_gguf,
            interleaved_rotary=True,
            joined_names=(
                (
                    "shared_mlp.input_linear.weight",
                    ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
                ),
                ("shared_mlp.output_linear.weight", ("ffn_down_shexp.weight",)),
            ),
        ),
        **STACKED,
    ),
    record(
        "mellum",
        "MellumForCausalLM",
        _read_mellum,
        Layout(mlp=SOFTMAX_EXPERTS),
        ignored_tensors=r"mtp\..*",
        **STACKED,
    ),
    record(
        "phimoe",
        "PhimoeForCausalLM",
        _read_phimoe,
        Layout(mlp=PHI_EXPERTS, has_norm_bias=True),
        same_architectures=("PhiMoEForCausalLM",),
        experts=MIXTRAL,
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(architecture="phimoe", read=_read_phimoe_gguf),
    ),
    record(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _read_hunyuan_moe,
        Layout(
            attention=hunyuan_v1_dense.HEADS,
            mlp=HUNYUAN_EXPERTS,
        ),
        renamed_tensors=((".mlp.gate.wg.", ".mlp.gate."),),
        gguf=GgufFormat(architecture="hunyuan-moe", read=_read_hunyuan_moe_gguf),
        **STACKED,
    ),
    record(
        "dots1",
        "Dots1ForCausalLM",
        _read_dots1,
        Layout(mlp=DEEPSEEK_EXPERTS),
        gguf=GgufFormat(architecture="dots1", read=_read_dots1_gguf, renamed=_RENAMED_BIAS),
        **STACKED,
    ),
    record(
        "solar_open",
        "SolarOpenForCausalLM",
        _read_solar_open,
        Layout(attention=attention_part(has_output_bias=False), mlp=DEEPSEEK_EXPERTS),
        **STACKED,
    ),
    record(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        _read_exaone_moe,
        Layout(mlp=DEEPSEEK_EXPERTS),
        renamed_tensors=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        **STACKED,
    ),
    record(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _read_cohere2_moe,
        replace(
            dense_table.COHERE,
            mlp=Part(tensors=UNBIASED_EXPERTS.tensors, load=_load_cohere2_mlp),
        ),
        has_whole_heads=True,
        **STACKED,
    ),
    record(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        _read_flex_olmo,
        Layout(
            attention=WHOLE_HEADS,
            mlp=SOFTMAX_EXPERTS,
            norms=POST_NORMS,
        ),
        has_whole_heads=True,
        **STACKED,
    ),
)
