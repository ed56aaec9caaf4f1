"""DeepSeek-V3 (transformers, modeling_deepseek_v3.py): V2, experts chosen by sigmoid and bias."""

from __future__ import annotations

from typing import Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS


def read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV3Config."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=fields.take("rope_interleave", bool, True), max_positions=4096
    )
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    defaults = Experts(
        n_experts=256,
        top_k=8,
        intermediate_size=2048,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        n_groups=8,
        top_groups=4,
        output_scale=2.5,
        layers=(3,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


LAYOUT: Final = Layout(attention=LATENT_HEADS, mlp=DEEPSEEK_EXPERTS)

FAMILY = record(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read_config,
    LAYOUT,
    mtp=MtpNames.LAYER,
    **STACKED,
    gguf=GgufFormat(
        architecture="deepseek2",
        claims=deepseek_v2.has_sigmoid,
        read=deepseek_v2.read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
)
