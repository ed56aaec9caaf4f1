"""Mistral 4 (transformers, modeling_mistral4.py): DeepSeek-V3, Ministral 3's queries, a softmax.

Experts are chosen by softmax without a bias.
"""

from __future__ import annotations

from dataclasses import replace

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, Latent, ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, ministral3
from shardnet.model.families.expert_parts import MISTRAL_EXPERTS, STACKED
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS

LATENT = Latent(
    rank=256, rope_size=64, nope_size=64, value_size=128, query_rank=1024, interleaved=True
)
SCALING = ministral3.SCALING | {
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def read_config(fields: Fields) -> ModelConfig:
    """Read a Mistral4Config."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=1048576,
        defaults=LATENT,
        rope=_read_rope,
        has_whole_heads=True,
        scaling=SCALING,
    )
    config = replace(config, temperature=ministral3.read_temperature(fields, config, SCALING))
    defaults = Experts(
        n_experts=128,
        top_k=4,
        intermediate_size=2048,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        layers=(0,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions of a key's rotated part, whose share of `head_size` is said twice."""
    rotated = fields.positive("qk_rope_head_dim", LATENT.rope_size)
    rope = read_rope(
        fields,
        max_positions,
        head_size,
        may_be_partial=True,
        share=rotated / head_size,
        ignored=ministral3.IGNORED,
        scaling=SCALING,
    )
    if rope.rotated(head_size) != rotated:
        raise fields.unsupported("partial_rotary_factor", rope.share, str(rotated / head_size))
    return replace(rope, share=1.0)


FAMILY = record(
    "mistral4",
    "Mistral4ForCausalLM",
    read_config,
    Layout(attention=LATENT_HEADS, mlp=MISTRAL_EXPERTS),
    **STACKED,
)
