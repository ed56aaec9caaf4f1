"""DeepSeek-V4.1: as V4, but that layers share what they attend to.

A few layers make entries, which those behind them attend to as well, and some of these choose again
among them. Streams are mixed by the factors of the sub-layer before, and there are n-gram tables.
Keys are not rounded on their way into the caches, as the makers' own code does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Compressed, ModelConfig
from shardnet.model.families import deepseek_v4
from shardnet.model.families.engram_parts import (
    engram_looked_up,
    engram_tensors,
    load_engram,
    read_engram,
)
from shardnet.model.families.expert_parts import EXPERTS
from shardnet.model.families.family import decoder_stage
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource

_MOST_BLOCKS: Final = 1 << 16
"""Of entries that a row looks at further."""


def _read_config(fields: Fields) -> ModelConfig:
    for what in ("n_routed_experts", "num_experts_per_tok"):
        fields.ignore(f"dspark_{what}")  # predicts further tokens
    config = deepseek_v4.read_config(fields, _read_attention, n_hashed=0, is_lagged=True)
    return replace(config, ngrams=read_engram(fields, config))


def _read_attention(fields: Fields, config: ModelConfig) -> Compressed:
    n = config.n_layers
    rates = fields.take("compress_ratios", list)[:n]
    making, choosing = (fields.take(f"{kind}_source_layer_ids", list) for kind in ("kv", "index"))
    are_numbers = all(type(one) is int for one in (*rates, *making, *choosing))
    if not are_numbers or len(rates) != n or not all(0 <= one <= 128 for one in rates):
        raise fields.damaged(f"compress_ratios {rates} are not those of {n} layers")
    if any(rate and 256 % rate for rate in rates):
        raise fields.damaged(f"compress_ratios {rates} do not divide a block of 256 positions")
    sources = tuple(
        max((one for one in making if one <= layer), default=layer) for layer in range(n)
    )
    is_shared = all(
        rates[layer] == rates[source] and (not rates[layer] or source in choosing)
        for layer, source in enumerate(sources)
    )
    ascend = all(one < other for each in (making, choosing) for one, other in pairwise(each))
    if not (is_shared and ascend and all(rates[one] for one in making if 0 <= one < n)):
        raise fields.damaged(f"kv_source_layer_ids {making} do not make the entries of each layer")
    usual = deepseek_v4.read_compressed(
        fields, config, (*rates, 0), tuple(one for one in choosing if 0 <= one < n and rates[one])
    )
    return _read_blocks(fields, n, replace(usual, sources=sources))


def _read_blocks(fields: Fields, n_layers: int, usual: Compressed) -> Compressed:
    """Read in which blocks of entries layers look further."""
    layer = fields.take("candidate_source_layer_id", int, -1)
    n_blocks = fields.take("candidate_topk_blocks", int, 0)
    size = fields.take("candidate_block_size", int, 1)
    if not 0 <= layer < n_layers or not n_blocks:
        return usual
    n_chosen = usual.indexer.n_chosen
    if not (0 < n_blocks <= _MOST_BLOCKS and 0 < size <= 256 and n_blocks * size >= n_chosen):
        raise fields.damaged(
            f"candidate_topk_blocks {n_blocks} of {size} entries do not hold {n_chosen} of them"
        )
    return replace(usual, blocks_from=layer, n_blocks=n_blocks, block_size=size)


def _tensors(config: ModelConfig, layer: int) -> Table:
    return deepseek_v4.attention_tensors(config, layer) | engram_tensors(config, layer)


_LAYOUT: Final = Layout(
    attention=Part(tensors=_tensors, load=deepseek_v4.load_attention),
    mlp=Part(tensors=deepseek_v4.expert_tensors, load=deepseek_v4.load_deepseek_experts),
)


def _load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    from shardnet.model.layers.decoder_layer import AttentionSublayer
    from shardnet.model.mixers.compressed_attention import CompressedAttention, SharingSublayer

    made = _LAYOUT.load_layer(config, weights, layer)
    own = made.attention
    assert isinstance(own, AttentionSublayer)
    assert isinstance(own.self_attn, CompressedAttention)
    sharing = SharingSublayer(residual=own.residual, self_attn=own.self_attn)
    return load_engram(config, weights, layer, replace(made, attention=sharing))


FAMILY: Final = replace(
    record(
        "deepseek_v41_text",
        "DeepseekV41ForCausalLM",
        _read_config,
        _LAYOUT,
        renamed_tensors=(
            (".attn.indexer.k_norm.", ".attn.compressor.indexer.k_norm."),
            (".attn.indexer.wk.", ".attn.compressor.indexer.wk."),
            *deepseek_v4.RENAMED,
        ),
        ignored_tensors=r"mtp\..*|.*\.gate\.(e_score_correction_)?bias_vl",
        experts=EXPERTS,
        looked_up_tensors=engram_looked_up,
        has_whole_heads=True,
    ),
    load_stage=decoder_stage(_load_layer),
)
