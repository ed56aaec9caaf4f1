"""Ministral 3 (transformers, modeling_ministral3.py): Mistral with queries that grow.

How they do stands with the scaling of rotary positions.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig, Temperature
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import record

BETA = "llama_4_scaling_beta"
SCALING = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""What transformers takes where the config says nothing of rotary positions."""
IGNORED = (BETA, "max_position_embeddings")
"""What else stands there: how queries grow, and what the config says itself."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a Ministral3Config."""
    rope = partial(read_rope, ignored=IGNORED, scaling=SCALING)
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=262144, norm_eps=1e-5, head_size=128, rope=rope
    )
    return replace(
        config,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
        temperature=read_temperature(fields, config, SCALING),
    )


def read_temperature(
    fields: Fields, config: ModelConfig, scaling: Mapping[str, Any]
) -> Temperature | None:
    """Read how queries grow: not at all without the key or by 0. `scaling` is as in `read_rope`."""
    beta = rope_object(fields, scaling).nonzero(BETA)
    if beta is None or config.rope is None:
        return None
    return Temperature(scale=beta, floor=config.rope.original_max_positions)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    config = read_gguf_decoder(fields, tensors, factors)
    scale, log = fields.nonzero("attention.temperature_scale"), "yarn_log_multiplier"
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if (multiplier := fields.nonzero(f"rope.scaling.{log}")) is not None:
        fields.require("rope.scaling.mscale", multiplier)
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return config | {"rope_scaling": scaling | {BETA: scale}}


FAMILY = record(
    "ministral3",
    "Ministral3ForCausalLM",
    read_config,
    gguf=GgufFormat(architecture="mistral3", read=read_gguf, interleaved_rotary=True),
)
