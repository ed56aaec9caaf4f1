"""Mixtral (transformers, modeling_mixtral.py): Mistral with experts in the place of the MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import (
    has_params_experts,
    read_decoder,
    read_expert_counts,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    Factors,
    has_gguf_experts,
    read_gguf_decoder,
    read_gguf_experts,
)
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import mistral
from shardnet.model.families.expert_parts import MIXTRAL, MIXTRAL_EXPERTS, in_all_layers
from shardnet.model.families.family import (
    ConsolidatedFormat,
    GgufFormat,
    Stacking,
)
from shardnet.model.families.layout import Layout, record

THETA = 1e6


def read_config(fields: Fields) -> ModelConfig:
    """Read a MixtralConfig: experts in every layer, a window in all or none."""
    rope = partial(read_rope, theta=THETA)
    config = read_decoder(fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=rope)
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    windows = (fields.optional("sliding_window"),) * config.n_layers
    return in_all_layers(replace(config, windows=windows), n_experts, top_k)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; each expert is as wide as the MLP that the model would have."""
    config = read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)
    inner = config["intermediate_size"]
    width = fields.positive("expert_feed_forward_length", inner)
    if width != inner:
        raise fields.unsupported("expert_feed_forward_length", width, str(inner))
    return config


def read_params(fields: Fields) -> dict[str, Any]:
    """Read Mistral's params.json with an object `moe`."""
    moe: Mapping[str, Any] = fields.take("moe", dict)
    inner = fields.inner("moe", moe)
    config = {
        "num_local_experts": inner.positive("num_experts"),
        "num_experts_per_tok": inner.positive("num_experts_per_tok"),
        "rope_theta": fields.number("rope_theta", THETA, within=THETAS),
    }
    inner.note_the_rest()
    return config | mistral.read_params(fields)


FAMILY = record(
    "mixtral",
    "MixtralForCausalLM",
    read_config,
    Layout(mlp=MIXTRAL_EXPERTS),
    experts=MIXTRAL,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="llama",
        claims=has_gguf_experts,
        read=read_gguf,
        interleaved_rotary=True,
    ),
    consolidated=ConsolidatedFormat(
        claims=lambda fields: not fields.given("multiple_of") and has_params_experts(fields),
        read=read_params,
    ),
)
