"""LFM2 (transformers, modeling_lfm2.py): short convolutions, and attention in a few layers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import FULL, read_decoder, read_layer_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_kv_heads, read_gguf_sizes
from shardnet.model.config.model_config import ModelConfig, ShortConv
from shardnet.model.config.rope import read_rope
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, linears, norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import Attention, GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

CONV: Final = "conv"
FINAL_NORM: Final = "model.embedding_norm"
_GGUF_NORM: Final = ("attention.layer_norm_rms_epsilon", "norm_eps")
_MAX_TAPS: Final = 64
_UNUSED: Final = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "num_heads"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "use_pos_enc"),
)
"""Keys of published configs that transformers does not look at."""


def read_config(fields: Fields) -> ModelConfig:
    """Read an Lfm2Config. Which layers have attention stands in either of two lists."""
    config = read_hybrid(fields, intermediate_size=12288)
    return replace(config, intermediate_size=_inner_size(fields, config.intermediate_size))


def read_hybrid(fields: Fields, *, intermediate_size: int) -> ModelConfig:
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
    )
    is_tied = fields.take("tie_embedding", bool, config.tie_word_embeddings)
    conv = read_conv(fields, config.hidden_size, _conv_layers(fields, config.n_layers))
    return replace(config, tie_word_embeddings=is_tied, short_conv=conv)


def read_conv(
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
    kinds = read_layer_kinds(fields, n_layers, FULL, CONV)
    if kinds is None:
        return tuple(layer for layer in range(n_layers) if layer not in attention)
    return tuple(layer for layer in range(n_layers) if kinds[layer] == CONV)


def _inner_size(fields: Fields, size: int) -> int:
    """Return the width of the MLP: two thirds of what is said, times a factor, rounded up."""
    size = fields.positive("block_ff_dim", size)
    fields.require("block_use_swiglu", True)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.positive("block_multiple_of", 256)
    if not fields.take("block_auto_adjust_ff_dim", bool, True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name a convolution or attention, and an MLP."""
    return mixer_tensors(config, layer) | mlp_tensors(config, layer)


def mlp_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the linears of a dense MLP."""
    inner, hidden = config.intermediate_size, config.hidden_size
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    return linears(f"model.layers.{layer}.feed_forward", shapes)


def mixer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name a convolution or attention, and the norms of a layer."""
    hidden = config.hidden_size
    around = norms(config, layer, "operator_norm", "ffn_norm")
    if conv := conv_tensors(config, layer):
        return around | conv
    attn = f"model.layers.{layer}.self_attn"
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "out_proj": (hidden, queries),
    }
    of_heads: Table = {f"{attn}.{name}_layernorm.weight": (config.head_size,) for name in "qk"}
    return around | linears(attn, shapes) | of_heads


def conv_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the convolution of a layer that has one, else nothing."""
    conv, hidden, prefix = config.short_conv, config.hidden_size, f"model.layers.{layer}.conv"
    if conv is None or layer not in conv.layers:
        return {}
    shapes = {"in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden)}
    taps: Table = {f"{prefix}.conv.weight": (hidden, 1, conv.n_taps)}
    if conv.has_bias:
        taps[f"{prefix}.conv.bias"] = (hidden,)
    return linears(prefix, shapes, with_bias=conv.has_bias) | taps


def head_tensors(config: ModelConfig) -> Table:
    """Name the final norm and the LM head, which is the embedding where they are tied."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        f"{FINAL_NORM}.weight": (config.hidden_size,),
        name: (config.vocab_size, config.hidden_size),
    }


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    mlp = load_gated(config, weights, f"model.layers.{layer}.feed_forward")
    return load_hybrid(config, weights, layer, mlp)


def load_gated(config: ModelConfig, weights: WeightSource, prefix: str) -> GatedMlp:
    """Take the linears of a gated MLP below `prefix`."""
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.shards.cut import INNER_EACH, Axis

    return GatedMlp(
        activation=config.activation,
        gate_up_proj=weights.linear(f"{prefix}.w1", f"{prefix}.w3", outputs=INNER_EACH),
        down_proj=weights.linear(f"{prefix}.w2", inputs=Axis.INNER),
    )


def load_hybrid(
    config: ModelConfig, weights: WeightSource, layer: int, mlp: GatedMlp | SparseMlp
) -> Layer:
    """Take the convolution or attention of the absolute `layer`, and its norms, around `mlp`."""
    from shardnet.model.layers.decoder_layer import Layer, Residual

    first, second = (
        weights.norm(f"model.layers.{layer}.{name}", config.norm_eps)
        for name in ("operator_norm", "ffn_norm")
    )
    mixer = _load_mixer(config, weights, layer)
    return Layer.of(Residual(before=first), mixer, Residual(before=second), mlp)


def _load_mixer(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
    if conv := load_conv(config, weights, layer):
        return conv
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import HeadNorm
    from shardnet.model.shards.cut import HEADS_EACH, Axis

    attn = f"model.layers.{layer}.self_attn"
    qkv_proj = weights.linear(*(f"{attn}.{name}_proj" for name in "qkv"), outputs=HEADS_EACH)
    o_proj = weights.linear(f"{attn}.out_proj", inputs=Axis.HEADS)
    queries, keys = (weights.norm(f"{attn}.{name}_layernorm", config.norm_eps) for name in "qk")
    qk_norm = HeadNorm.join(queries, keys, config.n_heads, config.n_kv_heads)
    return SelfAttention.of(config, layer, qkv_proj, o_proj, qk_norm)


def load_conv(config: ModelConfig, weights: WeightSource, layer: int) -> Attention | None:
    """Take the convolution of a layer that has one, else None."""
    from shardnet.model.layers.short_conv import ShortConvolution

    conv, prefix = config.short_conv, f"model.layers.{layer}.conv"
    if conv is None or layer not in conv.layers:
        return None
    return ShortConvolution(
        in_proj=weights.linear(f"{prefix}.in_proj"),
        out_proj=weights.linear(f"{prefix}.out_proj"),
        taps=weights.parameter(f"{prefix}.conv.weight").squeeze(1).T.contiguous(),
        bias=weights.parameter(f"{prefix}.conv.bias") if conv.has_bias else None,
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata: layers without heads of keys have a convolution."""
    config = read_gguf_sizes(fields, factors, norm=_GGUF_NORM)
    n_heads, has_heads = read_gguf_kv_heads(fields, config["num_hidden_layers"])
    fields.ignore("attention.key_length", "attention.value_length", "rope.dimension_count")
    return config | {
        "num_key_value_heads": n_heads,
        "layer_types": [FULL if has_own else CONV for has_own in has_heads],
        "conv_L_cache": fields.positive("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer, FINAL_NORM),
    head_tensors=head_tensors,
    gguf=GgufFormat(architecture="lfm2", read=read_gguf),
)
