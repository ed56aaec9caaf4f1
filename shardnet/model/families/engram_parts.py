"""Engram (arXiv 2601.07372): tables of n-grams that some layers look up before their attention.

Knows keys of the config, and names. Must not know the family whose layers have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardnet.errors import shown
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig, Ngrams
from shardnet.model.config.ngram_hashes import head_rows
from shardnet.model.families.tensor_shapes import Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource

_MOST: Final = 32
"""Tokens of an n-gram, and heads of those of one length."""
_MOST_TABLES: Final = 4096
"""Heads of all layers, each with a prime number of rows."""
_MOST_COLUMNS: Final = 1 << 16


def read_engram(fields: Fields, config: ModelConfig) -> Ngrams | None:
    """Read which layers look n-grams up, and how these are hashed; None for none."""
    layers = fields.take("engram_layer_ids", list, [])
    if not layers:
        return None
    longest = fields.positive("engram_max_ngram_size", at_most=_MOST)
    heads_each = fields.positive("engram_n_heads", at_most=_MOST)
    n_columns = fields.positive("engram_head_dim", at_most=_MOST_COLUMNS)
    own = Ngrams(
        width=(longest - 1) * heads_each * n_columns,
        longest=longest,
        heads_each=heads_each,
        least_rows=fields.positive("engram_vocab_size"),
        divisor=1,
        n_parts=1,
        seed=0,
        end_id=fields.take("engram_pad_token_id", int),
        n_taps=0,
        layers=tuple(layers),
        n_classes=fields.positive("engram_compressed_vocab_size", at_most=config.vocab_size),
    )
    every = range(config.n_layers)
    if any(type(n) is not int or n not in every for n in layers) or len({*layers}) < len(layers):
        raise fields.damaged(f"engram_layer_ids is {shown(layers)}, expected layers of the model")
    if longest < 2 or own.n_heads * len(layers) > _MOST_TABLES:
        raise fields.damaged(f"engram_max_ngram_size is {longest}, with {heads_each} heads each")
    if not 0 <= own.end_id < config.vocab_size:
        raise fields.damaged(f"engram_pad_token_id {own.end_id} is no token")
    n_rows = [sum(head_rows(own, layer)) for layer in layers]
    if (said := fields.take("engram_num_embeddings", list, n_rows)) != n_rows:
        raise fields.damaged(f"engram_num_embeddings is {shown(said)}, expected {n_rows}")
    return own


def engram_tensors(config: ModelConfig, layer: int) -> Table:
    """Name what gates the rows that a layer looks up; nothing for a layer that does not."""
    own, name = config.ngrams, f"model.layers.{layer}.engram"
    if own is None or layer not in own.layers:
        return {}
    assert config.streams is not None
    each = (config.streams.count, config.hidden_size)
    projected = (each[0] + 1) * each[1]
    made = linears(name, {"kv_proj": (projected, own.width)})
    return made | {f"{name}.{kind}_weight": each for kind in "qk"}


def engram_looked_up(config: ModelConfig, layer: int) -> Table:
    """Name the table of a layer, if it has one."""
    own = config.ngrams
    if own is None or layer not in own.layers:
        return {}
    n_rows, n_columns = sum(head_rows(own, layer)), own.width // own.n_heads
    return {f"model.layers.{layer}.engram.embed.weight": (n_rows, n_columns)}


def load_engram(config: ModelConfig, weights: WeightSource, layer: int, made: Layer) -> Layer:
    """Put what looks n-grams up before the attention of a layer, if it has a table."""
    from shardnet.model.mixers.short_conv import EngramFeatures, NgramSublayer

    if config.ngrams is None or layer not in config.ngrams.layers:
        return made
    features = EngramFeatures(config, weights, layer)
    return replace(made, attention=NgramSublayer(features=features, attention=made.attention))
