"""Phi-3, Phi-4 and Phi with experts (transformers, modeling_phi3.py, _phimoe.py).

Phi-3 is Llama with the projections stored joined; that only a part of each head is rotated, and
how, follows from the config.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families import mistral
from shardnet.model.families.expert_parts import MIXTRAL, PHI_EXPERTS, with_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import FUSED_HEADS, JOINED_MLP


def _read_phi3(fields: Fields) -> ModelConfig:
    """Read a Phi3Config: part of each head rotated, other rotary tables for long contexts."""
    fields.require("full_attn_mod", 1)
    fields.require("interpolate_factor", 1)
    aliases = {"su": "longrope", "yarn": "longrope"}  # of the first versions
    rope = partial(read_rope, aliases=aliases, may_be_partial=True, original=4096)
    config = read_decoder(fields, max_positions=4096, norm_eps=1e-5, rope=rope, attention_bias=None)
    return replace(config, windows=(fields.optional("sliding_window"),) * config.n_layers)


def _read_phi3_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata, where a window of 0 is none."""
    window = fields.take("attention.sliding_window", int, 0)
    return read_gguf_decoder(fields) | {"sliding_window": window or None}


def _read_phimoe(fields: Fields) -> ModelConfig:
    """Read a PhimoeConfig: two experts, and the second is chosen without the first."""
    fields.require("router_jitter_noise", 0.01)
    fields.ignore("input_jitter_noise")  # of training
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=_read_phimoe_rope
    )
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 16, 2)
    fields.require("num_experts_per_tok", 2)
    config = replace(
        config,
        has_head_bias=fields.take("lm_head_bias", bool, False),
        windows=(fields.optional("sliding_window"),) * config.n_layers,
    )
    return with_experts(config, n_experts, top_k, normalize_top_k=False)


def _read_phimoe_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions, whose magnitude is said for short contexts and for long ones."""
    inner = rope_object(fields)
    short, long = (inner.optional_number(f"{name}_mscale") for name in ("short", "long"))
    if short != long:
        raise fields.unsupported("short_mscale", short, f"long_mscale, {long}")
    rope = read_rope(
        fields,
        max_positions,
        head_size,
        theta=1e6,
        ignored=("short_mscale", "long_mscale"),
        aliases={"su": "longrope"},
    )
    return rope if short is None else replace(rope, magnitude=short)


def _read_phimoe_gguf(fields: GgufFields) -> dict[str, Any]:
    config = _read_phi3_gguf(fields) | mistral.read_mixtral_gguf(fields)
    bias = gguf_biases(fields)["attention_bias"]
    return config | {"attention_bias": bias, "lm_head_bias": "output.bias" in fields.tensors}


FAMILIES: Final = (
    record(
        "phi3",
        "Phi3ForCausalLM",
        _read_phi3,
        Layout(attention=FUSED_HEADS, mlp=JOINED_MLP),
        gguf=GgufFormat(architecture="phi3", read=_read_phi3_gguf),
    ),
    record(
        "phimoe",
        "PhimoeForCausalLM",
        _read_phimoe,
        Layout(mlp=PHI_EXPERTS, has_norm_bias=True),
        same_architectures=("PhiMoEForCausalLM",),
        experts=MIXTRAL,
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(architecture="phimoe", read=_read_phimoe_gguf),
    ),
)
