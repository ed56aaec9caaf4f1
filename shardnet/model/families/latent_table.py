"""Families with DeepSeek-V3's latents and experts: a reader of their keys and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Latent, ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, mistral
from shardnet.model.families.expert_parts import (
    DEEPSEEK_EXPERTS,
    MISTRAL_EXPERTS,
    RENAMED_BIAS,
    STACKED,
)
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS

LAYOUT: Final = Layout(attention=LATENT_HEADS, mlp=DEEPSEEK_EXPERTS)


def read_experts(
    fields: Fields,
    config: ModelConfig,
    counts: tuple[int, int] = (256, 8),
    inner: int = 2048,
    first: int = 3,
    **more: Any,
) -> ModelConfig:
    """Add experts that are chosen by sigmoid and a bias; arguments as deepseek_v2.read_experts."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    return deepseek_v2.read_experts(
        fields, config, counts, inner, first, **{"output_scale": 2.5, **more}
    )


def _read_v3(fields: Fields) -> ModelConfig:
    """Read a DeepseekV3Config."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=fields.take("rope_interleave", bool, True), max_positions=4096
    )
    return read_experts(fields, config, n_groups=8, top_groups=4)


def _read_glm4_lite(fields: Fields) -> ModelConfig:
    """Read a Glm4MoeLiteConfig (GLM-4.7-Flash). In GGUF it goes as DeepSeek-V3."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=202752,
        norm_eps=1e-5,
        defaults=Latent(
            rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=768, interleaved=True
        ),
    )
    return read_experts(fields, config, (64, 4), 1536, 1, output_scale=1.8)


# Queries that grow, and a softmax

_MISTRAL: Final = Latent(
    rank=256, rope_size=64, nope_size=64, value_size=128, query_rank=1024, interleaved=True
)
_SCALING: Final = mistral.SCALING | {
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def _read_mistral4(fields: Fields) -> ModelConfig:
    """Read a Mistral4Config: experts are chosen by softmax without a bias."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=1048576,
        defaults=_MISTRAL,
        rope=_read_mistral4_rope,
        has_whole_heads=True,
        scaling=_SCALING,
    )
    config = replace(config, temperature=mistral.read_temperature(fields, config, _SCALING))
    return deepseek_v2.read_experts(fields, config, (128, 4), 2048, 0)


def _read_mistral4_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions of a key's rotated part, whose share of `head_size` is said twice."""
    rotated = fields.positive("qk_rope_head_dim", _MISTRAL.rope_size)
    rope = read_rope(
        fields,
        max_positions,
        head_size,
        may_be_partial=True,
        share=rotated / head_size,
        ignored=mistral.IGNORED,
        scaling=_SCALING,
    )
    if rope.rotated(head_size) != rotated:
        raise fields.unsupported("partial_rotary_factor", rope.share, str(rotated / head_size))
    return replace(rope, share=1.0)


FAMILIES: Final = (
    record(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _read_v3,
        LAYOUT,
        mtp=MtpNames.LAYER,
        **STACKED,
        gguf=GgufFormat(
            architecture="deepseek2",
            claims=deepseek_v2.has_sigmoid,
            read=deepseek_v2.read_gguf,
            renamed=RENAMED_BIAS,
        ),
    ),
    record(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        _read_glm4_lite,
        LAYOUT,
        mtp=MtpNames.LAYER,
        **STACKED,
    ),
    record(
        "mistral4",
        "Mistral4ForCausalLM",
        _read_mistral4,
        Layout(attention=LATENT_HEADS, mlp=MISTRAL_EXPERTS),
        **STACKED,
    ),
)
