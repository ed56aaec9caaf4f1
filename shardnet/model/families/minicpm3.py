"""MiniCPM3 (transformers, modeling_minicpm3.py): DeepSeek's latents, and Granite's multipliers.

Heads turn as Llama's do.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import even_head_size
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_sizes
from shardnet.model.config.model_config import Latent, ModelConfig
from shardnet.model.families import deepseek_v2
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT


def _read_config(fields: Fields) -> ModelConfig:
    """Read a MiniCPM3Config."""
    hidden_size, n_heads = (fields.positive(key) for key in ("hidden_size", "num_attention_heads"))
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=False,
        max_positions=32768,
        norm_eps=1e-5,
        is_tied=True,
        defaults=Latent(
            rank=256,
            rope_size=32,
            nope_size=64,
            value_size=even_head_size(fields, hidden_size, n_heads),
            query_rank=768,
            interleaved=False,
        ),
    )
    depth, base = _number(fields, "scale_depth", 1.4), _number(fields, "dim_model_base", 256)
    return replace(
        config,
        mlp_bias=fields.take("mlp_bias", bool, False),
        embedding_multiplier=fields.number("scale_emb", 12.0),
        residual_multiplier=1.0 if depth is None else depth / math.sqrt(config.n_layers),
        logit_divisor=1.0 if base is None else hidden_size / base,
    )


def _number(fields: Fields, key: str, default: float) -> float | None:
    """Read a number, where null stands for none."""
    return fields.optional_number(key) if fields.given(key) else default


def _read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata, without multipliers and the columns of values: llama.cpp has our own."""
    fields.ignore("attention.head_count_kv")
    rope_size, whole = (
        fields.positive(key) for key in ("rope.dimension_count", "attention.key_length")
    )
    if whole <= rope_size:
        raise fields.damaged(f"attention.key_length is {whole}, expected over {rope_size}")
    return read_gguf_sizes(fields, factors) | {
        "kv_lora_rank": fields.positive("attention.kv_lora_rank"),
        "q_lora_rank": fields.optional("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": whole - rope_size,
    }


FAMILY = record(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    _read_config,
    Layout(attention=LATENT),
    gguf=GgufFormat(architecture="minicpm3", read=_read_gguf),
)
