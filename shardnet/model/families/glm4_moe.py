"""GLM-4.5 (transformers, modeling_glm4_moe.py): heads half rotated, DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part


def read_config(fields: Fields) -> ModelConfig:
    """Read a Glm4MoeConfig."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        intermediate_size=10944,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        has_head_norms=fields.take("use_qk_norm", bool, False),
    )
    defaults = Experts(
        n_experts=128,
        top_k=8,
        intermediate_size=1408,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        layers=(1,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata. What no key says, the tensors do."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return (
        read_gguf_decoder(fields, tensors, factors, may_be_partial=True)
        | deepseek_v2.read_gguf_experts(fields)
        | {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        }
    )


FAMILY = record(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read_config,
    Layout(attention=attention_part(has_output_bias=False), mlp=DEEPSEEK_EXPERTS),
    mtp=MtpNames.LAYER,
    **STACKED,
    gguf=GgufFormat(
        architecture="glm4moe",
        read=read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
)
