"""Qwen 3.8 (transformers, modeling_qwen4_exp.py): Qwen 3.5's parts between gated residual streams.

Attention is over blocks of positions that an indexer chooses.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import FULL, LINEAR
from shardnet.model.config.fields import MAX_SIZE, Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_delta_net, read_gguf_each
from shardnet.model.config.model_config import (
    Activation,
    DeltaNet,
    Indexer,
    ModelConfig,
    Ngrams,
    StreamKind,
    Streams,
)
from shardnet.model.config.ngram_hashes import part_rows
from shardnet.model.families.expert_parts import STACKED, read_experts
from shardnet.model.families.family import MtpNames, decoder_stage
from shardnet.model.families.layout import record
from shardnet.model.families.parts import Part
from shardnet.model.families.qwen_hybrid import (
    LAYOUT,
    gguf_format,
    read_gguf_hybrid,
    read_text_config,
)
from shardnet.model.families.tensor_shapes import Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource

_MOST: Final = 64
"""Of each of several small numbers."""
MAX_PARTS: Final = 4096
_INDEXED: Final = "indexed_attention"


def _read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen4ExpTextConfig: every layer has experts."""
    config = read_text_config(
        fields, n_kv_heads=2, intermediate_size=5632, attention=_INDEXED, share=1.0
    )
    every = tuple(range(config.n_layers))
    config = read_experts(fields, config, every, counts=(512, 10), inner=512, shared=512, sums=True)
    fields.ignore("number_of_conv_states", "mtp")
    streams = Streams(
        count=fields.positive("hc_count", 4),
        kind=StreamKind.GATED,
        eps=config.norm_eps,
        rank=fields.positive("hc_lowrank", 320),
        in_mtp=True,
    )
    own = _read_gate(fields, config)
    linear = () if own is None else own.layers
    attending = tuple(layer for layer in every if layer not in linear)
    ahead = (*attending, config.n_layers)  # what predicts further tokens attends too
    indexer = _read_indexer(fields, config, ahead) if attending else None
    ngrams = _read_ngrams(fields, config, linear)
    return replace(config, streams=streams, delta_net=own, indexer=indexer, ngrams=ngrams)


def _read_gate(fields: Fields, config: ModelConfig) -> DeltaNet | None:
    """Read how gates open the outputs of DeltaNets."""
    usual = config.activation.value
    gate = fields.take("output_gate_type", str, usual)
    if gate not in ("sigmoid", Activation.SILU.value) or (gate != "sigmoid" and gate != usual):
        raise fields.unsupported("output_gate_type", gate, "sigmoid, and silu where hidden_act is")
    own = config.delta_net
    return None if own is None else replace(own, gates_alone=gate == "sigmoid")


def _read_indexer(fields: Fields, config: ModelConfig, layers: tuple[int, ...]) -> Indexer:
    """Read what chooses blocks of positions in `layers`."""
    if fields.positive("indexer_kv_heads") != 1:
        raise fields.damaged("indexer_kv_heads is not 1")
    assert config.rope is not None
    own = Indexer(
        n_heads=fields.positive("indexer_n_heads"),
        head_size=fields.positive("indexer_head_dim"),
        n_chosen=fields.positive("indexer_budget"),
        interleaved=False,
        norm_eps=config.norm_eps,
        n_pooled=fields.positive("indexer_compress_ratio"),
        n_axes=3 if config.rope.axes else 1,
        layers=layers,
    )
    if own.n_chosen % own.n_pooled:
        raise fields.damaged("indexer_budget is no multiple of indexer_compress_ratio")
    if own.head_size < config.rope.rotated(config.head_size):
        raise fields.damaged("indexer_head_dim is less than what is rotated of a head")
    return own


def _read_ngrams(fields: Fields, config: ModelConfig, linear: tuple[int, ...]) -> Ngrams | None:
    """Read the layers that add features of n-grams, which have DeltaNets; None for none."""
    numbers = fields.take("ple_layer_ids", list, [])
    own = Ngrams(
        width=fields.positive("ple_embed_dim", config.hidden_size),
        longest=fields.positive("ngram_size", 3, at_most=_MOST),
        heads_each=fields.positive("heads_per_ngram", 8, at_most=_MOST),
        least_rows=fields.positive("ngram_vocab_size_base", 20_000_000),
        divisor=fields.positive("make_ngram_vocab_size_divisible_by", 128),
        n_parts=fields.positive("split_ngram_parts", 512, at_most=MAX_PARTS),
        seed=fields.take("seed", int, 1234),
        end_id=fields.take("ple_eos_token_id", int, next(iter(config.eos_token_ids), -1)),
        n_taps=fields.positive("ple_conv_kernel_size", 4, at_most=_MOST),
        layers=tuple(sorted({n - 1 for n in numbers if isinstance(n, int)})),
        given_rows=_read_given(fields, "ple_head_rows", MAX_SIZE),
        given_factors=_read_given(fields, "ple_factors", ((1 << 63) - 1) // config.vocab_size),
    )
    if not numbers:
        return None
    if (len(own.given_rows), len(own.given_factors)) not in ((0, 0), (own.n_heads, own.longest)):
        raise fields.damaged("ple_head_rows or ple_factors are not one of each head and token")
    if not set(own.layers) <= set(linear):
        raise fields.damaged(f"ple_layer_ids {numbers} are not all of layers with DeltaNets")
    if own.longest < 2 or own.width % own.n_heads or own.end_id < 0:
        raise fields.damaged("ple_layer_ids without n-grams, whole heads of them or an end of text")
    return own


def _read_given(fields: Fields, key: str, most: int) -> tuple[int, ...]:
    """Read what a GGUF says of hashes, in place of what they follow from: positive integers."""
    found = fields.take(key, list, [])
    if any(type(one) is not int or not 1 <= one <= most for one in found):
        raise fields.damaged(f"{key} holds {shown(found)}, expected 1 to {most}")
    return tuple(found)


def _tensors(config: ModelConfig, layer: int) -> Table:
    """Name Qwen 3.5's DeltaNet or attention, and what chooses positions or adds n-grams."""
    made, own, ngrams = LAYOUT.attention.tensors(config, layer), config.indexer, config.ngrams
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    if own is not None and layer in own.layers:
        name, size = f"{prefix}.self_attn.indexer", own.head_size
        made |= linears(name, {"index_qk_proj": ((own.n_heads + 1) * size, hidden)})
        made |= {f"{name}.{kind}_layernorm.weight": (size,) for kind in "qk"}
    if ngrams is not None and layer in ngrams.layers:
        name, width = f"{prefix}.ple", config.streams_width
        shapes = {"key_proj": (width, ngrams.width), "value_proj": (hidden, ngrams.width)}
        kinds = ("key", "query", "conv")
        made |= linears(name, shapes) | {f"{name}.norm_{kind}.weight": (width,) for kind in kinds}
        made |= {f"{name}.conv1d.weight": (width, 1, ngrams.n_taps)}
    return made


def _looked_up(config: ModelConfig, layer: int) -> Table:
    """Name the parts of a layer's table."""
    own = config.ngrams
    if own is None or layer not in own.layers:
        return {}
    name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
    n_columns = own.width // own.n_heads
    rows = enumerate(part_rows(own, layer))
    return {f"{name}{number}.weight": (n, n_columns) for number, n in rows}


_LAYOUT: Final = replace(
    LAYOUT,
    attention=Part(tensors=_tensors, load=LAYOUT.attention.load),
    norms=("", "", "", ""),
    final_norm="",
)


def _load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    from shardnet.model.mixers.short_conv import NgramFeatures, NgramSublayer

    made = _LAYOUT.load_layer(config, weights, layer)
    if config.ngrams is None or layer not in config.ngrams.layers:
        return made
    features = NgramFeatures(config, weights, layer)
    return replace(made, attention=NgramSublayer(features=features, attention=made.attention))


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; llama.cpp knows no other gate of DeltaNets."""
    config = read_gguf_hybrid(fields) | read_gguf_delta_net(fields, takes_turns=True)
    key, n_layers = "attention.compress_ratios", config["num_hidden_layers"]
    ratios = read_gguf_each(fields, key, int, n_layers)
    kinds = [FULL if ratio else LINEAR for ratio in ratios]
    if config.setdefault("layer_types", kinds) != kinds:
        raise fields.unsupported(key, ratios, "above 0 in layers with attention, and in no others")
    return (
        config
        | _read_gguf_ngrams(fields)
        | {
            "output_gate_type": "sigmoid",
            "hc_count": fields.positive("hyper_connection.count"),
            "hc_lowrank": fields.positive("hyper_connection.low_rank"),
            "indexer_n_heads": fields.positive("attention.indexer.head_count"),
            "indexer_kv_heads": 1,
            "indexer_head_dim": fields.positive("attention.indexer.key_length"),
            "indexer_budget": fields.positive("attention.indexer.top_k"),
            "indexer_compress_ratio": max(ratios),
        }
    )


def _read_gguf_ngrams(fields: Fields) -> dict[str, Any]:
    """Read of n-grams how they are hashed, and in which layer they are added."""
    if fields.missing("ple.layers"):
        return {}
    layers, rows = fields.take("ple.layers", list), fields.take("ple.head_vocab_sizes", list)
    if len(layers) != 1 or type(layers[0]) is not int:
        raise fields.unsupported("ple.layers", layers, "a single one")
    begins = fields.take("ple.head_offsets", list)
    if begins != [0, *accumulate(one for one in rows if type(one) is int)][:-1]:
        raise fields.damaged(f"ple.head_offsets {shown(begins)} do not follow each other")
    fields.ignore("ple.image_token_id")
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": fields.positive("embedding_length_per_layer_input") * len(rows),
        "ngram_size": fields.positive("ple.ngram_size"),
        "heads_per_ngram": fields.positive("ple.heads_per_ngram"),
        "ple_conv_kernel_size": fields.positive("ple.conv_kernel"),
        "ple_eos_token_id": fields.take("ple.eos_token_id", int),
        "ple_head_rows": rows,
        "ple_factors": fields.take("ple.layer_multipliers", list),
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
    }


_MIXER: Final = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_BLOCK_NAMES: Final = (
    *((f"attn_hc.{own}.weight", f"hc_attn_{name}.weight") for name, own in _MIXER.items()),
    *((f"ffn_hc.{own}.weight", f"hc_ffn_{name}.weight") for name, own in _MIXER.items()),
    *((f"model.hc_head.{own}.weight", f"output_hc_{name}.weight") for name, own in _MIXER.items()),
    *((f"hc_head.{own}.weight", f"nextn.hc_head_{name}.weight") for name, own in _MIXER.items()),
    *((f"self_attn.indexer.{k}_layernorm.weight", f"indexer.{k}_norm.weight") for k in "qk"),
    *((f"ple.{kind}_proj.weight", f"ple_{kind}.weight") for kind in ("key", "value")),
    *((f"ple.norm_{k}.weight", f"ple_norm_{k}.weight") for k in ("key", "query", "conv")),
    ("ple.conv1d.weight", "ple_conv1d.weight"),
)
_GGUF: Final = replace(
    gguf_format("qwen4exp", _read_gguf),
    named_as="qwen35moe",
    block_names=_BLOCK_NAMES,
    joined_names=(
        (
            "self_attn.indexer.index_qk_proj.weight",
            ("indexer.q_proj.weight", "indexer.k_proj.weight"),
        ),
    ),
)
FAMILY: Final = replace(
    record(
        "qwen4_exp_text",
        "Qwen4ExpForCausalLM",
        _read_config,
        _LAYOUT,
        renamed_tensors=(
            (".attn_hyper_connection.", ".attn_hc."),
            (".mlp_hyper_connection.", ".ffn_hc."),
            (".hyper_connection_mixer.", ".hc_head."),
        ),
        ignored_tensors=r".*\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)",
        mtp=MtpNames.PREFIX,
        **STACKED,
        gguf=_GGUF,
        pretokenizer="qwen35",
        looked_up_tensors=_looked_up,
        has_whole_heads=True,
    ),
    load_stage=decoder_stage(_load_layer, ""),
)
