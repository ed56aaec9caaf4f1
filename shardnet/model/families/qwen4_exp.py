"""Qwen 3.8 (transformers, modeling_qwen4_exp.py): Qwen 3.5's parts between gated residual streams.

Attention is over blocks of positions that an indexer chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import (
    Activation,
    DeltaNet,
    Indexer,
    ModelConfig,
    StreamKind,
    Streams,
)
from shardnet.model.families.expert_parts import STACKED, read_experts
from shardnet.model.families.layout import record
from shardnet.model.families.parts import Part
from shardnet.model.families.qwen3_5 import LAYOUT, read_text_config
from shardnet.model.families.tensor_shapes import Table, linears

_INDEXED: Final = "indexed_attention"
_OF_NGRAMS: Final = (
    *("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram"),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "seed"),
    "number_of_conv_states",
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen4ExpTextConfig: every layer has experts."""
    config = read_text_config(
        fields, n_kv_heads=2, intermediate_size=5632, attention=_INDEXED, share=1.0
    )
    every = tuple(range(config.n_layers))
    config = read_experts(fields, config, every, counts=(512, 10), inner=512, shared=512, sums=True)
    if fields.take("ple_layer_ids", list, []):
        raise fields.unsupported("ple_layer_ids", "[...]", "[]")
    fields.ignore(*_OF_NGRAMS)
    streams = Streams(
        count=fields.positive("hc_count", 4),
        kind=StreamKind.GATED,
        eps=config.norm_eps,
        rank=fields.positive("hc_lowrank", 320),
    )
    own = _read_gate(fields, config)
    linear = () if own is None else own.layers
    attending = tuple(layer for layer in every if layer not in linear)
    indexer = _read_indexer(fields, config, attending) if attending else None
    return replace(config, streams=streams, delta_net=own, indexer=indexer)


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


def _tensors(config: ModelConfig, layer: int) -> Table:
    """Name Qwen 3.5's DeltaNet or attention, and what chooses positions."""
    made, own = LAYOUT.attention.tensors(config, layer), config.indexer
    if own is None or layer not in own.layers:
        return made
    name, size = f"model.layers.{layer}.self_attn.indexer", own.head_size
    made |= linears(name, {"index_qk_proj": ((own.n_heads + 1) * size, config.hidden_size)})
    return made | {f"{name}.{kind}_layernorm.weight": (size,) for kind in "qk"}


FAMILY: Final = record(
    "qwen4_exp_text",
    "Qwen4ExpForCausalLM",
    _read_config,
    replace(
        LAYOUT,
        attention=Part(tensors=_tensors, load=LAYOUT.attention.load),
        norms=("", "", "", ""),
        final_norm="",
    ),
    renamed_tensors=(
        (".attn_hyper_connection.", ".attn_hc."),
        (".mlp_hyper_connection.", ".ffn_hc."),
        (".hyper_connection_mixer.", ".hc_head."),
    ),
    ignored_tensors=r"mtp\..*",
    **STACKED,
    pretokenizer="qwen35",
)
