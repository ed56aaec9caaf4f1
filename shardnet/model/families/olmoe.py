"""OLMoE (transformers, modeling_olmoe.py): Qwen3-MoE's experts, OLMo-2's norms over all heads."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import olmo2, qwen3_moe
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import sparse_mlp


def read_config(fields: Fields) -> ModelConfig:
    """Read an OlmoeConfig: experts in every layer, each as wide as `intermediate_size`."""
    config = read_decoder(fields, max_positions=4096, norm_eps=1e-5, intermediate_size=2048)
    clip = fields.optional_number("clip_qkv")
    if clip is not None:
        raise fields.unsupported("clip_qkv", clip, "null")
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 64, 8)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=config.intermediate_size,
            normalize_top_k=fields.take("norm_topk_prob", bool, False),
            layers=tuple(range(config.n_layers)),
        ),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)


SPARSE_MLP: Final = Part(
    tensors=partial(sparse_mlp, names=qwen3_moe.EXPERTS), load=qwen3_moe.load_sparse_mlp
)

FAMILY = record(
    "olmoe",
    "OlmoeForCausalLM",
    read_config,
    Layout(attention=olmo2.WHOLE_HEADS, mlp=SPARSE_MLP),
    experts=qwen3_moe.EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(architecture="olmoe", read=read_gguf),
    has_whole_heads=True,
)
