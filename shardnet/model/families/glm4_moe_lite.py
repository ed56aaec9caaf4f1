"""GLM-4.7-Flash (transformers, modeling_glm4_moe_lite.py): DeepSeek-V3 with other sizes.

In GGUF it goes as DeepSeek-V3.
"""

from __future__ import annotations

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, Latent, ModelConfig
from shardnet.model.families import deepseek_v2, deepseek_v3
from shardnet.model.families.expert_parts import STACKED
from shardnet.model.families.family import MtpNames
from shardnet.model.families.layout import record


def read_config(fields: Fields) -> ModelConfig:
    """Read a Glm4MoeLiteConfig."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=202752,
        norm_eps=1e-5,
        defaults=Latent(
            rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=768, interleaved=True
        ),
    )
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    defaults = Experts(
        n_experts=64,
        top_k=4,
        intermediate_size=1536,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        output_scale=1.8,
        layers=(1,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


FAMILY = record(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    read_config,
    deepseek_v3.LAYOUT,
    mtp=MtpNames.LAYER,
    **STACKED,
)
