"""Phi-3 and Phi-4 (transformers, modeling_phi3.py): Llama with the projections stored joined.

That only a part of each head is rotated, and how, follows from the config.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import FUSED_HEADS, JOINED_MLP


def read_config(fields: Fields) -> ModelConfig:
    """Read a Phi3Config: part of each head rotated, other rotary tables for long contexts."""
    fields.require("full_attn_mod", 1)
    fields.require("interpolate_factor", 1)
    aliases = {"su": "longrope", "yarn": "longrope"}  # of the first versions
    rope = partial(read_rope, aliases=aliases, may_be_partial=True, original=4096)
    config = read_decoder(fields, max_positions=4096, norm_eps=1e-5, rope=rope)
    return replace(config, windows=(fields.optional("sliding_window"),) * config.n_layers)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata, where a window of 0 is none."""
    window = fields.take("attention.sliding_window", int, 0)
    return read_gguf_decoder(fields, tensors, factors) | {"sliding_window": window or None}


FAMILY = record(
    "phi3",
    "Phi3ForCausalLM",
    read_config,
    Layout(attention=FUSED_HEADS, mlp=JOINED_MLP),
    gguf=GgufFormat(architecture="phi3", read=read_gguf),
)
