"""MiMo-V2-Flash (transformers, modeling_mimo_v2_flash.py): values narrower than keys, and scaled.

Layers with a window have twice the heads of keys, attention sinks and positions of their own.
Experts are chosen as DeepSeek-V3's, without shared ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_marks,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_each, read_gguf_sizes
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import HeadShape, ModelConfig, Rope
from shardnet.model.config.rope import read_scaling
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, RENAMED_BIAS, STACKED
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.weight_source import WeightSource

_SHARE: Final = 0.334
_VALUE_SCALE: Final = 0.707
_THETAS: Final = {FULL: ("rope_theta", 5e6), SLIDING: ("swa_rope_theta", 1e4)}


def read_config(fields: Fields) -> ModelConfig:
    """Read a MiMoV2FlashConfig, or what its makers publish."""
    epsilons = ("rms_norm_eps", "layernorm_epsilon")  # both where transformers saved it again
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=131072,
        norm_eps=1e-5,
        norm_key=next((key for key in epsilons if fields.given(key)), epsilons[0]),
        head_size=192,
        intermediate_size=16384,
        rope=partial(_read_rope, FULL),
    )
    fields.ignore(*epsilons)
    local_heads = 2 * config.n_kv_heads
    value_size = fields.positive("v_head_dim", 128)
    is_unscaled = fields.given("attention_value_scale")  # where it is null
    for key, only in (
        ("swa_num_attention_heads", config.n_heads),
        ("swa_num_key_value_heads", local_heads),
        ("swa_head_dim", config.head_size),
        ("swa_v_head_dim", value_size),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
        ("n_shared_experts", 0),
    ):
        fields.require(key, only)
    fields.ignore("attention_chunk_size", "hybrid_block_size")  # how others compute the windows
    if config.n_heads % local_heads:
        raise fields.damaged(
            f"num_attention_heads {config.n_heads} is no multiple of twice num_key_value_heads"
        )
    before = fields.optional("sliding_window_size")  # without the token itself
    window = fields.positive("sliding_window", 129) if before is None else before + 1
    fields.ignore("sliding_window")
    marks = read_marks(fields, "hybrid_layer_pattern", config.n_layers)
    marks = marks or [bool(layer and (layer + 1) % 6) for layer in range(config.n_layers)]
    config = replace(
        config,
        windows=read_windows(fields, config.n_layers, window, marks.__getitem__),
        n_kv_heads=local_heads,
        full_heads=HeadShape(
            n_kv_heads=config.n_kv_heads, key_size=config.head_size, value_size=value_size
        ),
        value_size=value_size,
        value_multiplier=fields.number(
            "attention_value_scale", 1.0 if is_unscaled else _VALUE_SCALE
        ),
        local_rope=_read_rope(SLIDING, fields, config.max_positions, config.head_size),
        has_sinks=True,
    )
    return _read_experts(fields, config)


def _read_rope(kind: str, fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the rotary positions of one kind of layers."""
    key, theta = _THETAS[kind]
    theta = fields.number(key, theta, within=THETAS)
    share = fields.number("partial_rotary_factor", _SHARE)
    both = fields.inner("rope_parameters", fields.take("rope_parameters", dict, {}))
    own = both.inner(kind, both.take(kind, dict, {}))
    both.ignore(FULL, SLIDING)
    both.note_the_rest()
    plain = Rope(
        theta=own.number("rope_theta", theta, within=THETAS),
        share=own.number("partial_rotary_factor", share),
    )
    return read_scaling(own, plain, max_positions=max_positions, head_size=head_size)


def _read_experts(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    config = deepseek_v2.read_experts(fields, config, (256, 8), 2048, 1, shared=0)
    marks = read_marks(fields, "moe_layer_freq", config.n_layers)
    if config.experts is None or marks is None:
        return config
    layers = tuple(layer for layer, is_sparse in enumerate(marks) if is_sparse)
    return replace(config, experts=replace(config.experts, layers=layers) if layers else None)


def _attention(config: ModelConfig, layer: int) -> Table:
    """Name attention, in layers with a window with sinks."""
    attn, heads, hidden = f"model.layers.{layer}.self_attn", config.heads(layer), config.hidden_size
    inputs = {
        "q_proj": (config.n_heads * heads.key_size, hidden),
        "k_proj": (heads.n_kv_heads * heads.key_size, hidden),
        "v_proj": (heads.n_kv_heads * heads.value_size, hidden),
    }
    sinks: Table = {} if config.window(layer) is None else {f"{attn}.sinks": (config.n_heads,)}
    return (
        linears(attn, inputs, with_bias=config.attention_bias)
        | linears(attn, {"o_proj": (hidden, config.n_heads * heads.value_size)})
        | sinks
    )


def _load_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take attention whose values are multiplied."""
    from shardnet.model.kernels.linear import ScaledLinear
    from shardnet.model.layers.modules import SelfAttention

    made, heads = SelfAttention.load(config, weights, layer), config.heads(layer)
    values = heads.n_kv_heads * heads.value_size
    plain = made.qkv_proj.shape[0] - values
    parts = (plain, 1.0), (values, config.value_multiplier)
    made = replace(made, qkv_proj=ScaledLinear.of(made.qkv_proj, *parts))
    if config.window(layer) is None:
        return made
    sinks = weights.parameter(f"model.layers.{layer}.self_attn.sinks")
    kind = replace(made.kind, sinks=sinks.view(made.n_kv_heads, -1, 1))
    return replace(made, kind=kind)


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. Windows are counted without the token itself, as by the makers.

    Older files do not say what values are multiplied by.
    """
    fields.require("expert_gating_func", 2)  # sigmoid
    config = read_gguf_sizes(fields)
    n_layers, size = config["num_hidden_layers"], fields.positive("attention.key_length")
    is_local = (
        read_marks(fields, "attention.sliding_window_pattern", n_layers) or [False] * n_layers
    )
    each = read_gguf_each(fields, "attention.head_count_kv", int, n_layers)
    n_kv_heads = each[0] // (1 + is_local[0])
    if each != [n_kv_heads * (1 + local) for local in is_local]:
        raise fields.unsupported("attention.head_count_kv", each, "twice as many in all windows")
    routers = [f"blk.{n}.ffn_gate_inp.weight" for n in range(n_layers)]
    return config | {
        "num_key_value_heads": n_kv_heads,
        "head_dim": size,
        "v_head_dim": fields.positive("attention.value_length"),
        "attention_value_scale": fields.number("attention.value_scale", _VALUE_SCALE),
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "hybrid_layer_pattern": [int(local) for local in is_local],
        "sliding_window_size": fields.positive("attention.sliding_window"),
        "partial_rotary_factor": fields.positive("rope.dimension_count") / size,
        "swa_rope_theta": fields.number("rope.freq_base_swa", 1e4, within=THETAS),
        "moe_layer_freq": [int(name in fields.tensors) for name in routers],
        **deepseek_v2.read_gguf_experts(fields, n_shared=0),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
    }


FAMILY = record(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    read_config,
    Layout(attention=Part(tensors=_attention, load=_load_attention), mlp=DEEPSEEK_EXPERTS),
    renamed_tensors=(("attention_sink_bias", "sinks"),),
    ignored_tensors=r"model\.mtp\..*",
    **STACKED,
    gguf=GgufFormat(architecture="mimo2", read=read_gguf, renamed=RENAMED_BIAS),
    pretokenizer="qwen2",
    has_whole_heads=True,
)
