"""OLMoE (transformers, modeling_olmoe.py): Qwen3-MoE's experts, OLMo-2's norms over all heads."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.expert_config import read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import olmo2, qwen3_moe
from shardnet.model.families.family import Family, GgufFormat, Stacking, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import Table, attention, pre_norms, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


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


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, norms over all queries and all keys, a router and its experts."""
    return (
        attention(config, layer)
        | olmo2.whole_norms(config, layer)
        | sparse_mlp(config, layer, qwen3_moe.EXPERTS)
        | pre_norms(config, layer)
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    self_attn = olmo2.whole_norm_attention(config, weights, layer)
    sparse = qwen3_moe.load_sparse_mlp(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, sparse)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    experts=qwen3_moe.EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(architecture="olmoe", read=read_gguf),
    has_whole_heads=True,
)
