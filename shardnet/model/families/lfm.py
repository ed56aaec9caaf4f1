"""LFM2, with experts or without, and LFM3 (transformers, modeling_lfm2.py, _lfm2_moe.py, _lfm3.py).

Short convolutions, and attention in a few layers. LFM2's experts are chosen by sigmoid and a bias.
LFM3's attention has norms over heads and a gate for each; some of it has a window and turns by
another base, the other layers turn half of their columns. Four norms a layer.
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
    read_layer_kinds,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_kv_heads, read_gguf_sizes
from shardnet.model.config.model_config import ModelConfig, ShortConv
from shardnet.model.config.rope import read_rope
from shardnet.model.families import gemma4
from shardnet.model.families.expert_parts import LFM, LFM_EXPERTS, with_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import GATED_HEADS, Part, attention_part
from shardnet.model.families.tensor_shapes import Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource

_CONV: Final = "conv"


_GGUF_NORM: Final = ("attention.layer_norm_rms_epsilon", "norm_eps")


_MAX_TAPS: Final = 64


_UNUSED: Final = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "num_heads"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "use_pos_enc"),
)
"""Keys of published configs that transformers does not look at."""


def _read_lfm2(fields: Fields) -> ModelConfig:
    """Read an Lfm2Config. Which layers have attention stands in either of two lists."""
    config = _read_hybrid(fields, intermediate_size=12288)
    return replace(config, intermediate_size=_inner_size(fields, config.intermediate_size))


def _read_hybrid(fields: Fields, *, intermediate_size: int) -> ModelConfig:
    """Read what the models with and without experts say alike; `intermediate_size` is a default."""
    fields.ignore(*_UNUSED)
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=128000,
        norm_key="norm_eps",
        norm_eps=1e-5,
        intermediate_size=intermediate_size,
        is_tied=True,
        rope=partial(read_rope, theta=1e6),
        attention_bias=None,
    )
    is_tied = fields.take("tie_embedding", bool, config.tie_word_embeddings)
    conv = _read_conv(fields, config.hidden_size, _conv_layers(fields, config.n_layers))
    return replace(config, tie_word_embeddings=is_tied, has_head_norms=True, short_conv=conv)


def _read_conv(
    fields: Fields, width: int, layers: tuple[int, ...], n_taps: int = 3
) -> ShortConv | None:
    """Read the convolutions of `layers`, None where there are none; `n_taps` is a default."""
    conv = ShortConv(
        width=width,
        n_taps=fields.positive("conv_L_cache", n_taps, at_most=_MAX_TAPS),
        has_bias=fields.take("conv_bias", bool, False),
        layers=layers,
    )
    return conv if layers else None


def _conv_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    attention = fields.take("full_attn_idxs", list, [*range(n_layers)])
    kinds = read_layer_kinds(fields, n_layers, FULL, _CONV)
    if kinds is None:
        return tuple(layer for layer in range(n_layers) if layer not in attention)
    return tuple(layer for layer in range(n_layers) if kinds[layer] == _CONV)


def _inner_size(fields: Fields, size: int) -> int:
    """Return the width of the MLP: two thirds of what is said, times a factor, rounded up."""
    size = fields.positive("block_ff_dim", size)
    fields.require("block_use_swiglu", True)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.positive("block_multiple_of", 256)
    if not fields.take("block_auto_adjust_ff_dim", bool, True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _conv_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the convolution of a layer that has one, else nothing."""
    conv, hidden, prefix = config.short_conv, config.hidden_size, f"model.layers.{layer}.conv"
    if conv is None or layer not in conv.layers:
        return {}
    shapes = {"in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden)}
    taps: Table = {f"{prefix}.conv.weight": (hidden, 1, conv.n_taps)}
    if conv.has_bias:
        taps[f"{prefix}.conv.bias"] = (hidden,)
    return linears(prefix, shapes, with_bias=conv.has_bias) | taps


def _load_conv(config: ModelConfig, weights: WeightSource, layer: int) -> Attention | None:
    """Take the convolution of a layer that has one, else None."""
    from shardnet.model.mixers.short_conv import ShortConvolution

    conv, prefix = config.short_conv, f"model.layers.{layer}.conv"
    if conv is None or layer not in conv.layers:
        return None
    return ShortConvolution(
        in_proj=weights.linear(f"{prefix}.in_proj"),
        out_proj=weights.linear(f"{prefix}.out_proj"),
        taps=weights.parameter(f"{prefix}.conv.weight").squeeze(1).T.contiguous(),
        bias=weights.parameter(f"{prefix}.conv.bias") if conv.has_bias else None,
    )


def _conv_or(attention: Part) -> Part:
    """Make the part of the layers that have a convolution, and of `attention` in the others."""

    def tensors(config: ModelConfig, layer: int) -> Table:
        return _conv_tensors(config, layer) or attention.tensors(config, layer)

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
        return _load_conv(config, weights, layer) or attention.load(config, weights, layer)

    return Part(tensors=tensors, load=load)


def _read_lfm2_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata: layers without heads of keys have a convolution."""
    config = read_gguf_sizes(fields, norm=_GGUF_NORM)
    n_heads, has_heads = read_gguf_kv_heads(fields, config["num_hidden_layers"])
    fields.ignore("attention.key_length", "attention.value_length", "rope.dimension_count")
    return config | {
        "num_key_value_heads": n_heads,
        "layer_types": [FULL if has_own else _CONV for has_own in has_heads],
        "conv_L_cache": fields.positive("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


_LAYOUT: Final = Layout(
    attention=_conv_or(attention_part("out_proj", norms=("q_layernorm", "k_layernorm"))),
    mlp=LFM_EXPERTS,
    norms=("operator_norm", "", "ffn_norm", ""),
    final_norm="model.embedding_norm",
)


def _read_moe(fields: Fields) -> ModelConfig:
    """Read an Lfm2MoeConfig: the first layers have a dense MLP."""
    config = _read_hybrid(fields, intermediate_size=7168)
    counts = read_expert_counts(fields, ("num_experts", "num_local_experts"), 32, 4)
    first = fields.take("num_dense_layers", int, 2)
    fields.require("use_expert_bias", True)
    return with_experts(
        config,
        *counts,
        intermediate_size=fields.positive("moe_intermediate_size", 1792),
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        output_scale=fields.number("routed_scaling_factor", 1.0),
        layers=tuple(range(max(0, first), config.n_layers)),
    )


def _read_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return _read_lfm2_gguf(fields) | {
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "num_dense_layers": fields.take("leading_dense_block_count", int, 0),
    }


_PERIOD: Final = 4


_ROPES: Final[dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


_read_rope = partial(gemma4.read_rope, ropes=_ROPES)


def _covers(fields: Fields) -> bool:
    """Whether attention has gates, and sub-layers have norms behind them."""
    gates = fields.take("use_attention_gate", bool, True)
    after = fields.take("use_sandwich_norm", bool, True)
    return bool(gates and after)


def _read_lfm3(fields: Fields) -> ModelConfig:
    """Read an Lfm3Config."""
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=128000,
        norm_key="norm_eps",
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=7680,
        activation_key=None,
        is_tied=True,
        rope=partial(_read_rope, FULL),
    )
    kinds = read_layer_kinds(fields, config.n_layers, FULL, SLIDING, _CONV)
    kinds = kinds or [_usual_kind(layer) for layer in range(config.n_layers)]
    window = fields.positive("sliding_window", 256)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _CONV)
    return replace(
        config,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        local_rope=_read_rope(SLIDING, fields, config.max_positions, config.head_size),
        short_conv=_read_conv(fields, config.hidden_size, layers, n_taps=7),
    )


def _usual_kind(layer: int) -> str:
    """Return what a layer has where no key says it."""
    if layer % _PERIOD == 2:
        return FULL
    return SLIDING if layer and layer % _PERIOD == 0 else _CONV


FAMILIES: Final = (
    record(
        "lfm2",
        "Lfm2ForCausalLM",
        _read_lfm2,
        _LAYOUT,
        gguf=GgufFormat(architecture="lfm2", read=_read_lfm2_gguf),
    ),
    record(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _read_moe,
        _LAYOUT,
        experts=LFM,
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(
            architecture="lfm2moe",
            read=_read_moe_gguf,
            renamed=(("expert_bias", "expert_bias.bias"),),
        ),
    ),
    record(
        "lfm3",
        "Lfm3ForCausalLM",
        _read_lfm3,
        replace(
            _LAYOUT,
            attention=_conv_or(GATED_HEADS),
            norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        ),
        covers=_covers,
    ),
)
