"""Families with experts put together from shared parts: a reader of keys and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_expert_counts,
    read_mlp_kinds,
    read_sparse_layers,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.limits import MAX_EXPERTS, NORM_EPS
from shardnet.model.config.model_config import ModelConfig, NormKind, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, dense_table, gemma4, llama_table
from shardnet.model.families.expert_parts import (
    DEEPSEEK_EXPERTS,
    ERNIE_EXPERTS,
    KOLIBRI_EXPERTS,
    MINIMAX_EXPERTS,
    MIXTRAL,
    RENAMED_BIAS,
    SOFTMAX_EXPERTS,
    STACKED,
    UNBIASED_EXPERTS,
    read_experts,
    with_experts,
)
from shardnet.model.families.family import GgufFormat, MtpNames, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import (
    FUSED_HEADS,
    LATENT_HEADS,
    WHOLE_HEADS,
    Part,
    attention_part,
)

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

_MELLUM_ROPES: Final[dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


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
        has_head_norms=True,
        windows=read_windows(fields, config.n_layers, window, lambda _: False),
        local_rope=_read_mellum_rope(SLIDING, fields, config.max_positions, config.head_size),
    )
    layers = read_mlp_kinds(fields, config.n_layers, 0)
    return read_experts(fields, config, layers, counts=(64, 8), inner=896, sums=True)


def _read_dots1(fields: Fields) -> ModelConfig:
    config = read_decoder(fields, n_kv_heads=32, intermediate_size=10944)
    fields.require("scoring_func", "noaux_tc")
    fields.require("moe_layer_freq", 1)
    window, first = fields.optional("sliding_window"), fields.take("max_window_layers", int, 62)
    config = replace(
        config,
        has_head_norms=True,
        windows=read_windows(
            fields, config.n_layers, window, lambda n: window is not None and n >= first
        ),
    )
    return deepseek_v2.read_experts(fields, config, (128, 8), 1408, 0, normalize_top_k=False)


def _read_solar_open(fields: Fields) -> ModelConfig:
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=10240,
        rope=partial(read_rope, theta=1e6),
    )
    fields.require("use_qk_norm", False)
    return deepseek_v2.read_experts(fields, config, (128, 8), 1280, 0)


def _read_dots1_gguf(fields: GgufFields) -> dict[str, Any]:
    config = _read_glm4_gguf(fields)
    del config["use_qk_norm"]
    return config


def _read_exaone_moe(fields: Fields) -> ModelConfig:
    """Read an ExaoneMoeConfig: EXAONE 4's windows, norms before sub-layers."""
    config = replace(llama_table.read_exaone4(fields), has_head_norms=True)
    shared = fields.positive("num_shared_experts", 1)
    return deepseek_v2.read_experts(
        fields, config, (64, 8), 1024, 1, shared=shared, output_scale=2.5
    )


def _read_cohere2_moe(fields: Fields) -> ModelConfig:
    """Read a Cohere2MoeConfig: what experts and shared ones give is averaged or added."""
    first = fields.take("first_k_dense_replace", int, 0)
    period = fields.positive("prefix_dense_sliding_window_pattern", 1)
    config = dense_table.read_cohere2(fields, max(0, first), period, head_size=128)
    layers = read_mlp_kinds(fields, config.n_layers, first)
    counts = read_expert_counts(fields, ("num_experts", "num_local_experts"), 8, 2)
    normalizes = fields.take("norm_topk_prob", bool, True)
    n_shared = fields.take("num_shared_experts", int, 0)
    key = "shared_expert_combination_strategy"
    strategy = fields.one_of(key, ("average", "sum"), "average")
    scoring = fields.one_of("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    config = with_experts(
        config,
        *counts,
        has_softmax=scoring == "softmax",
        normalize_top_k=normalizes or scoring == "softmax",
        shared_intermediate_size=config.intermediate_size * max(0, n_shared),
        output_scale=0.5 if n_shared > 0 and strategy == "average" else 1.0,
        layers=layers,
    )
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


def _read_ernie_moe(fields: Fields) -> ModelConfig:
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
    return with_experts(
        config,
        n_experts,
        top_k,
        intermediate_size=inner,
        shared_intermediate_size=inner * max(0, n_shared),
        layers=layers,
    )


def _read_ernie_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    fields.ignore("expert_shared_feed_forward_length")  # follows from the others
    fields.require("expert_gating_func", 1)  # softmax
    return llama_table.read_ernie_gguf(fields) | {
        "moe_num_experts": fields.positive("expert_count"),
        "moe_k": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "moe_num_shared_experts": fields.take("expert_shared_count", int, 0),
        "moe_layer_interval": fields.positive("interleave_moe_layer_step", 1),
        "moe_layer_start_index": fields.take("leading_dense_block_count", int, 0),
    }


def _read_minimax(fields: Fields) -> ModelConfig:
    """Read a MiniMaxM2Config, with the published keys that transformers goes without."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=196608,
        head_size=128,
        intermediate_size=1536,
        rope=_read_minimax_rope,
        attention_bias=None,
    )
    fields.require("qk_norm_type", "per_layer")
    fields.require("scoring_func", "sigmoid")
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
    return with_experts(replace(config, windows=windows), n_experts, top_k)


def _read_minimax_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    rotated = fields.positive("rotary_dim", head_size)
    read = partial(read_rope, may_be_partial=True, theta=5000000.0, share=rotated / head_size)
    return read(fields, max_positions, head_size)


def _read_minimax_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return read_gguf_decoder(fields) | {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "intermediate_size": fields.positive("expert_feed_forward_length"),
    }


def _read_glm4(fields: Fields) -> ModelConfig:
    """Read a Glm4MoeConfig."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        intermediate_size=10944,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    config = replace(config, has_head_norms=fields.take("use_qk_norm", bool, False))
    return deepseek_v2.read_experts(fields, config, (128, 8), 1408, 1)


def _read_glm4_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. What no key says, the tensors do."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return (
        read_gguf_decoder(fields, may_be_partial=True)
        | deepseek_v2.read_gguf_experts(fields)
        | {
            "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.tensors,
        }
    )


_LEFT_OUT: Final = ("architectures", "head_dim", "q_head_dim", "use_qk_norm")
"""What is read elsewhere, and what the makers say of latents in words of other attention."""


_SARVAM_NAMES: Final = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


def _read_sarvam(fields: Fields) -> ModelConfig:
    """Read a SarvamMoEConfig, also with the keys of its makers."""
    fields.require("use_bias", only=False)
    fields.ignore("max_window_layers")  # there are no windows
    bias = fields.take("use_qkv_bias", bool, False)
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=131072,
        head_size=64,
        intermediate_size=8192,
        rope=partial(read_rope, theta=8e6),
        attention_bias=bias,
    )
    config = replace(config, has_head_norms=fields.take("use_qk_norm", bool, True))
    return _read_sarvam_experts(fields, config, (128, 6), 1024)


def _read_sarvam_latents(fields: Fields) -> ModelConfig:
    """Read a SarvamMLAConfig, also with the keys of its makers."""
    raw = fields.take_all()
    kept = {key: raw[key] for key in raw if key not in _LEFT_OUT}
    fields = Fields(kept, fields.where, unknown=fields.unknown)
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=4096,
        defaults=replace(deepseek_v2.LATENT, query_rank=None),
        rope=partial(read_rope, aliases={"deepseek_yarn": "yarn"}),
    )
    config = _read_sarvam_experts(fields, config, (128, 8), 2048)
    fields.note_the_rest()
    return config


def _read_sarvam_experts(
    fields: Fields, config: ModelConfig, counts: tuple[int, int], inner: int
) -> ModelConfig:
    """Add DeepSeek-V3's experts; the arguments are defaults."""
    fields.require("moe_router_enable_expert_bias", only=True)
    fields.require("score_function", "sigmoid")
    fields.ignore("output_dropout")
    shared = fields.positive("num_shared_experts", 1)
    return deepseek_v2.read_experts(
        fields, config, counts, inner, 1, shared=shared, output_scale=2.5
    )


def _read_flint(fields: Fields) -> ModelConfig:
    """Read a FlintConfig."""
    config = read_decoder(
        fields, n_kv_heads=4, max_positions=262144, head_size=128, intermediate_size=6144
    )
    last = config.n_layers - 1
    config = _read_local_layers(fields, config, lambda n: n >= 2 and n % 4 != 1 and n != last)
    first = 2 if fields.missing("mlp_only_layers") else 0
    layers = [n for n in read_sparse_layers(fields, config.n_layers) if n >= first]
    config = read_experts(
        fields, config, tuple(layers), counts=(256, 6), inner=512, shared=1024, sums=True
    )
    return replace(config, has_sinks=True)


def _read_kolibri(fields: Fields) -> ModelConfig:
    """Read a Kolibri1Config."""
    inner = fields.optional("moe_intermediate_size") or 512
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=262144,
        head_size=128,
        intermediate_size=inner,
        attention_bias=None,
    )
    config = _read_local_layers(fields, config, lambda n: (n + 1) % 5 != 0)
    layers = tuple(range(config.n_layers))
    return read_experts(fields, config, layers, counts=(384, 6), inner=512, shared=512)


def _read_local_layers(
    fields: Fields, config: ModelConfig, is_local: Callable[[int], bool]
) -> ModelConfig:
    """Add which layers have windows, by default those that are `is_local`: only they turn heads."""
    window = fields.positive("sliding_window", 513)
    windows = read_windows(fields, config.n_layers, window, is_local)
    nope = tuple(n for n in range(config.n_layers) if windows[n] is None)
    return replace(config, windows=windows, nope_layers=nope, has_head_norms=True)


FAMILIES: Final = (
    record(
        "mellum",
        "MellumForCausalLM",
        _read_mellum,
        Layout(mlp=SOFTMAX_EXPERTS),
        ignored_tensors=r"mtp\..*",
        **STACKED,
    ),
    record(
        "dots1",
        "Dots1ForCausalLM",
        _read_dots1,
        Layout(mlp=DEEPSEEK_EXPERTS),
        gguf=GgufFormat(architecture="dots1", read=_read_dots1_gguf, renamed=RENAMED_BIAS),
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
            dense_table.COHERE, mlp=Part(tensors=UNBIASED_EXPERTS.tensors, load=_load_cohere2_mlp)
        ),
        has_whole_heads=True,
        **STACKED,
    ),
    record(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _read_ernie_moe,
        Layout(mlp=ERNIE_EXPERTS),
        ignored_tensors=r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\..*",
        **STACKED,
        gguf=GgufFormat(
            architecture="ernie4_5-moe", read=_read_ernie_moe_gguf, renamed=RENAMED_BIAS
        ),
    ),
    record(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _read_minimax,
        Layout(attention=WHOLE_HEADS, mlp=MINIMAX_EXPERTS),
        experts=MIXTRAL,
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(architecture="minimax-m2", read=_read_minimax_gguf, renamed=RENAMED_BIAS),
        has_whole_heads=True,
    ),
    record(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _read_glm4,
        Layout(attention=attention_part(has_output_bias=False), mlp=DEEPSEEK_EXPERTS),
        mtp=MtpNames.LAYER,
        **STACKED,
        gguf=GgufFormat(architecture="glm4moe", read=_read_glm4_gguf, renamed=RENAMED_BIAS),
    ),
    record(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        _read_sarvam,
        Layout(attention=FUSED_HEADS, mlp=DEEPSEEK_EXPERTS),
        same_architectures=("SarvamMoEForCausalLM",),
        renamed_tensors=_SARVAM_NAMES,
        **STACKED,
    ),
    record(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        _read_sarvam_latents,
        Layout(attention=LATENT_HEADS, mlp=DEEPSEEK_EXPERTS),
        same_architectures=("SarvamMLAForCausalLM",),
        **STACKED,
    ),
    record(
        "flint",
        "FlintForCausalLM",
        _read_flint,
        Layout(mlp=UNBIASED_EXPERTS),
        renamed_tensors=(
            (".self_attn.softmax_offset", ".self_attn.sinks"),
            (".mlp.shared_expert.", ".mlp.shared_experts."),
        ),
        **STACKED,
    ),
    record(
        "kolibri1",
        "Kolibri1ForCausalLM",
        _read_kolibri,
        Layout(
            mlp=KOLIBRI_EXPERTS,
            norms=(
                *("input_layernorm", "post_attn_norm"),
                *("post_attention_layernorm", "post_ffn_norm"),
            ),
        ),
        renamed_tensors=((".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),),
        **STACKED,
    ),
)
