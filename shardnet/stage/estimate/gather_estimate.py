"""What shards of a stage gather of each row, and what of its weights each has: from a config, as
stage/load.py cuts linears.

Knows which linears are cut by what, and which are too small for it. Pure. Must not know how long a
gather takes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import (
    Table,
    embedding_tensors,
    head_tensors,
    is_quantizable,
    layer_tensors,
    mtp_tensors,
)
from shardnet.model.shards.cut import WHOLE, Division, stays_whole
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    embedding_weight_bytes,
    every_stage_bytes,
    head_weight_bytes,
    mtp_weight_bytes,
    one_layer_bytes,
    shared_weight_bytes,
    tail_weight_bytes,
    tied_weight_bytes,
)
from shardnet.types import LayerRange

Columns = tuple[int, ...]
"""The columns of each gather, of all shards together."""

_INNER = re.compile(
    r"\.(mlp|feed_forward|block_sparse_moe|shared_mlp|moe|mixer\.shared_experts)\."
    r"|\.mixer\.(up|down)_proj\."
)
"""Linears of MLPs, which are always cut, as those of experts are."""
_ATTENTION = re.compile(r"\b(self_attn|attn|mixer)\.(?!q_a_|kv_a_|in_|out_proj)|\bself_attn\.out_")
"""Linears of attention, which are cut where its heads are."""
_OUTPUT = re.compile(r"\.(o_proj|out_proj|dense|c_proj)\.weight$")
_KV = re.compile(r"\.[kv]_proj\.weight$")
_QKV = re.compile(r"\.(qkv_proj|c_attn)\.weight$")
_JOINED = re.compile(r"\.(([qkvg]|gate|g_a)_proj|in_proj_(qkv|z))\.weight$")
"""Linears that a mixer asks for as one."""


def layer_gathers(config: ModelConfig, layer: int) -> Columns:
    """Return what is gathered in the absolute `layer`."""
    return *_mixer_gathers(config, layer), *_mlp_gathers(config, layer)


def embedding_gathers(config: ModelConfig) -> Columns:
    """Return what is gathered behind the embedding: every shard gives a row of its own."""
    return _behind(config.vocab_size, config.hidden_size) and (config.hidden_size,)


def head_gathers(config: ModelConfig) -> Columns:
    """Return what is gathered behind the LM head."""
    return _behind(config.vocab_size, config.hidden_size)


def _behind(n_out: int, n_in: int) -> Columns:
    """Return what is gathered behind a linear or table of which outputs alone are cut."""
    return () if stays_whole(n_out, n_in) else (n_out,)


def _mixer_gathers(config: ModelConfig, layer: int) -> Columns:
    """Return what attention gathers, or what is in its place or beside it."""
    width, own, conv = config.hidden_size, config.delta_net, config.short_conv
    if layer in config.mixerless_layers:
        return ()
    if conv is not None and layer in conv.layers:
        return _behind(3 * conv.width, width) + _behind(width, conv.width)
    found: Columns = ()
    if own is not None and layer in own.layers:
        inner = own.mixed_width + own.value_width
        found = _behind(inner, width) + _behind(width, own.value_width)
        if not own.is_beside_attention:
            return found
    return found + _attention_gathers(config, layer)


def _attention_gathers(config: ModelConfig, layer: int) -> Columns:
    width, latent, each = config.hidden_size, config.latent, config.heads(layer)
    n_heads = config.query_heads[layer] if config.query_heads else config.n_heads
    found: Columns = ()
    if latent is not None:
        query_rank = latent.query_rank or width
        found = _behind(latent.width, width)
        if latent.query_rank is not None:
            found += _behind(query_rank, width)
        values = n_heads * latent.value_size
        projected, n_in = n_heads * (latent.nope_size + latent.rope_size), query_rank
    else:
        values = n_heads * each.value_size
        projected = (n_heads * (1 + config.has_gates) + each.n_kv_heads) * each.key_size
        projected, n_in = projected + each.n_kv_heads * each.value_size, width
    if family_of(config).has_whole_heads:
        return found + _behind(projected, n_in) + _behind(width, values)
    return (*found, values, width)


def _mlp_gathers(config: ModelConfig, layer: int) -> Columns:
    """Return the activated columns of an MLP and what the down projection makes of them; of experts
    those of all that a row visits, and of an MLP beside them.
    """
    experts, width = config.layer_experts(layer), config.hidden_size
    dense = (config.intermediate_size, width)
    if experts is None:
        has_none = config.mixerless_layers and layer not in config.mixerless_layers
        return () if has_none else dense
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    is_beside = layer < config.n_layers and name in layer_tensors(config, layer)
    return (dense if is_beside else ()) + _expert_gathers(experts, width)


def _expert_gathers(experts: Experts, width: int) -> Columns:
    """Return the gathers of a mixture; a shared expert that is as wide as the others joins them.

    What a row's experts give is added up before it travels, where the library computes them.
    """
    visits, shared = experts.top_k * experts.intermediate_size, experts.shared_intermediate_size
    if shared in (0, experts.intermediate_size):
        return visits + shared, width
    return visits, shared, width


def layer_division(config: ModelConfig, layer: int, form: WeightForm, n_bytes: int) -> Division:
    """Return how the weights of the absolute `layer`, of `n_bytes`, are divided over shards."""
    is_mtp = layer == config.n_layers
    tensors = mtp_tensors(config) if is_mtp else layer_tensors(config, layer)
    return _division(config, tensors, n_bytes, form)


def embedding_division(config: ModelConfig, form: WeightForm, tower_bytes: int = 0) -> Division:
    """Return how those of the embedding are, and of a tower for pictures."""
    n_bytes = embedding_weight_bytes(config, form)
    tables = _division(config, embedding_tensors(config), n_bytes, form)
    return Division.of_all([(n_bytes, tables), (tower_bytes, WHOLE)])


def tail_division(config: ModelConfig, form: WeightForm) -> Division:
    """Return how those are that a stage holds beside its layers because it is the last."""
    n_bytes = head_weight_bytes(config, form)
    parts = [(n_bytes, _division(config, head_tensors(config), n_bytes, form))]
    if config.has_mtp:
        n_bytes = mtp_weight_bytes(config, form)
        parts.append((n_bytes, layer_division(config, config.n_layers, form, n_bytes)))
        embedding_bytes = embedding_weight_bytes(config, form) - tied_weight_bytes(form)
        parts.append((embedding_bytes, embedding_division(config, form)))
    return Division.of_all(parts)


def stage_division(config: ModelConfig, layers: LayerRange, form: WeightForm) -> Division:
    """Return how the weights of a stage are divided over its shards."""
    sizes = [(layer, one_layer_bytes(config, layer, form)) for layer in layers]
    parts = [(size, layer_division(config, layer, form, size)) for layer, size in sizes]
    parts.append((every_stage_bytes(config, form), WHOLE))
    is_first, is_last = layers.start == 0, layers.end == config.n_layers
    if is_last:
        parts.append((tail_weight_bytes(config, form), tail_division(config, form)))
    if is_first:
        n_bytes = embedding_weight_bytes(config, form)
        n_bytes -= shared_weight_bytes(config, form) if is_last else 0
        parts.append((n_bytes, embedding_division(config, form)))
    return Division.of_all(parts)


def _division(config: ModelConfig, tensors: Table, n_bytes: int, form: WeightForm) -> Division:
    """Return how tensors of `n_bytes` are divided: ShardWeights decides the same for each.

    The bytes of linears are taken to be alike for each weight.
    """
    linears = {name: shape for name, shape in tensors.items() if is_quantizable(name, shape)}
    n_weights = sum(map(math.prod, linears.values()))
    rest = {name: math.prod(tensors[name]) for name in tensors.keys() - linears.keys()}
    rest_bytes = sum(rest.values()) * form.dtype.size_bytes
    of_linears = Fraction(max(0, n_bytes - rest_bytes), max(1, n_bytes * n_weights))
    of_rest = Fraction(form.dtype.size_bytes, max(1, n_bytes))
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for name, n in rest.items():
        by_heads = name.endswith(".kv_b_proj.weight")
        for kind in ("heads", "uncut_whole") if by_heads else ("whole",):
            found[kind] += n * of_rest
    for kind, part in _uneven(config, linears):
        found[kind] += part * of_linears
    return Division(**found)


def _uneven(config: ModelConfig, linears: Table) -> Iterator[tuple[str, Fraction]]:
    """List weights of linears that are not divided evenly, by the fields of Division."""
    joined: defaultdict[str, int] = defaultdict(int)
    of_kv = Fraction(2 * config.n_kv_heads, config.n_heads + 2 * config.n_kv_heads)
    for name, shape in linears.items():
        if ".experts." in name or _INNER.search(name):
            continue
        n, is_attention = math.prod(shape), bool(_ATTENTION.search(name))
        joined[_JOINED.sub(".", name)] += n
        if is_attention and not _OUTPUT.search(name):
            part = of_kv if _QKV.search(name) else Fraction(bool(_KV.search(name)))
            yield "kv_heads", n * part
            yield "heads", n * (1 - part)
    for name, n_joined in joined.items():
        if stays_whole(n_joined, 1):
            kind = "uncut_whole" if _ATTENTION.search(f"{name}_") else "whole"
            yield kind, Fraction(n_joined)
