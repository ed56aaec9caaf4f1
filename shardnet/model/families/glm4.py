"""GLM-4-0414 (transformers, modeling_glm4.py): norms around both sub-layers, heads half rotated.

Columns of a head that turn together stand side by side; gate and up are stored as one.
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
from shardnet.model.families.parts import JOINED_MLP, attention_part


def read_config(fields: Fields) -> ModelConfig:
    """Read a Glm4Config."""
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        head_size=128,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, True),
        has_pairs=fields.take("rope_interleave", bool, True),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata. Pairs with axes (GLM-4.1V) do not stand side by side there."""
    own = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_interleave": fields.missing("rope.dimension_sections"),
    }
    return read_gguf_decoder(fields, tensors, factors, may_be_partial=True) | own


FAMILY = record(
    "glm4",
    "Glm4ForCausalLM",
    read_config,
    Layout(
        attention=attention_part(has_output_bias=False),
        mlp=JOINED_MLP,
        norms=(
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_mlp_layernorm"),
        ),
    ),
    gguf=GgufFormat(architecture="glm4", read=read_gguf),
)
