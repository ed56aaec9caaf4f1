"""OLMoE (transformers, modeling_olmoe.py): Qwen3-MoE's experts, OLMo-2's norms over all heads."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import SOFTMAX_EXPERTS, STACKED, in_all_layers
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import WHOLE_HEADS


def read_config(fields: Fields) -> ModelConfig:
    """Read an OlmoeConfig: experts in every layer, each as wide as `intermediate_size`."""
    config = read_decoder(
        fields, max_positions=4096, norm_eps=1e-5, intermediate_size=2048, attention_bias=False
    )
    clip = fields.optional_number("clip_qkv")
    if clip is not None:
        raise fields.unsupported("clip_qkv", clip, "null")
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 64, 8)
    normalizes = fields.take("norm_topk_prob", bool, False)
    return in_all_layers(config, n_experts, top_k, normalize_top_k=normalizes)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)


FAMILY = record(
    "olmoe",
    "OlmoeForCausalLM",
    read_config,
    Layout(attention=WHOLE_HEADS, mlp=SOFTMAX_EXPERTS),
    **STACKED,
    gguf=GgufFormat(architecture="olmoe", read=read_gguf),
    has_whole_heads=True,
)
