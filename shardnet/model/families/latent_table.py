"""Families with DeepSeek-V3's latents and experts: a reader of their keys and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.model_config import Experts, Latent, ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, ministral3
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, MISTRAL_EXPERTS, STACKED
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS

_LAYOUT: Final = Layout(attention=LATENT_HEADS, mlp=DEEPSEEK_EXPERTS)
_EXPERTS: Final = Experts(
    n_experts=256,
    top_k=8,
    intermediate_size=2048,
    normalize_top_k=True,
    shared_intermediate_size=1,
    n_groups=8,
    top_groups=4,
    output_scale=2.5,
    layers=(3,),
)
_RENAMED: Final = (("correction_bias", "correction.bias"),)


def _read_experts(fields: Fields, config: ModelConfig, defaults: Experts) -> ModelConfig:
    """Add experts that are chosen by sigmoid and a bias."""
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    defaults = replace(defaults, normalize_top_k=fields.take("norm_topk_prob", bool, True))
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def _read_v3(fields: Fields) -> ModelConfig:
    """Read a DeepseekV3Config."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=fields.take("rope_interleave", bool, True), max_positions=4096
    )
    return _read_experts(fields, config, _EXPERTS)


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
    defaults = Experts(
        n_experts=64,
        top_k=4,
        intermediate_size=1536,
        normalize_top_k=True,
        shared_intermediate_size=1,
        output_scale=1.8,
        layers=(1,),
    )
    return _read_experts(fields, config, defaults)


# Positions that an indexer chooses

_INDEXER: Final = (
    *("index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq"),
    *("index_topk_pattern", "indexer_rope_interleave", "indexer_types", "layer_types"),
)
"""Keys of the indexer, which is left out: contexts end where it would choose some."""
_CHOSEN: Final[dict[str, Any]] = {
    "ignored_tensors": r"(model\.layers|blk)\.\d+\.(self_attn\.)?indexer\..*",
    "mtp": MtpNames.LAYER,
    **STACKED,
}


def _read_v32(fields: Fields) -> ModelConfig:
    """Read a DeepseekV32Config."""
    config = deepseek_v2.read_latent_attention(fields, interleaved=True, max_positions=163840)
    return _read_chosen(fields, config, _EXPERTS)


def _read_glm_dsa(fields: Fields) -> ModelConfig:
    """Read a GlmMoeDsaConfig (GLM-5)."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=True,
        max_positions=202752,
        norm_eps=1e-5,
        defaults=Latent(
            rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=2048, interleaved=True
        ),
    )
    return _read_chosen(fields, config, replace(_EXPERTS, n_groups=1, top_groups=1))


def _read_chosen(fields: Fields, config: ModelConfig, defaults: Experts) -> ModelConfig:
    """Read the experts, and how many positions are chosen: to so many all are attended to."""
    fields.ignore(*_INDEXER)
    fields.require("rope_interleave", True)
    n_chosen = fields.positive("index_topk", 2048)
    return replace(
        _read_experts(fields, config, defaults),
        max_positions=min(config.max_positions, n_chosen),
        n_chosen=n_chosen,
    )


def _read_glm_dsa_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    fields.require("expert_gating_func", 2)  # sigmoid
    fields.ignore(*(f"attention.indexer.{key}" for key in ("head_count", "key_length", "types")))
    config = deepseek_v2.read_gguf(fields, tensors, factors)
    return config | {"index_topk": fields.positive("attention.indexer.top_k")}


# Queries that grow, and a softmax

_MISTRAL: Final = Latent(
    rank=256, rope_size=64, nope_size=64, value_size=128, query_rank=1024, interleaved=True
)
_SCALING: Final = ministral3.SCALING | {
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
    config = replace(config, temperature=ministral3.read_temperature(fields, config, _SCALING))
    defaults = Experts(
        n_experts=128,
        top_k=4,
        intermediate_size=2048,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        layers=(0,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def _read_mistral4_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions of a key's rotated part, whose share of `head_size` is said twice."""
    rotated = fields.positive("qk_rope_head_dim", _MISTRAL.rope_size)
    rope = read_rope(
        fields,
        max_positions,
        head_size,
        may_be_partial=True,
        share=rotated / head_size,
        ignored=ministral3.IGNORED,
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
        _LAYOUT,
        mtp=MtpNames.LAYER,
        **STACKED,
        gguf=GgufFormat(
            architecture="deepseek2",
            claims=deepseek_v2.has_sigmoid,
            read=deepseek_v2.read_gguf,
            renamed=_RENAMED,
        ),
    ),
    record(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        _read_glm4_lite,
        _LAYOUT,
        mtp=MtpNames.LAYER,
        **STACKED,
    ),
    record("deepseek_v32", "DeepseekV32ForCausalLM", _read_v32, _LAYOUT, **_CHOSEN),
    record(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _read_glm_dsa,
        _LAYOUT,
        **_CHOSEN,
        gguf=GgufFormat(architecture="glm-dsa", read=_read_glm_dsa_gguf, renamed=_RENAMED),
    ),
    record(
        "mistral4",
        "Mistral4ForCausalLM",
        _read_mistral4,
        Layout(attention=LATENT_HEADS, mlp=MISTRAL_EXPERTS),
        **STACKED,
    ),
)
