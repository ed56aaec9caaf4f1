"""What shards of a stage gather of each row: from a config, as stage/load.py cuts linears.

Knows which linears are cut by what, and which are too small for it. Pure. Must not know how long a
gather takes.
"""

from __future__ import annotations

from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import layer_tensors
from shardnet.model.shards.cut import stays_whole

Columns = tuple[int, ...]
"""The columns of each gather, of all shards together."""


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
