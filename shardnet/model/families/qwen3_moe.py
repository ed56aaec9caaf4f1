"""Qwen3-MoE (transformers, modeling_qwen3_moe.py): Qwen3 with experts in most layers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_expert_counts,
    read_sparse_layers,
    read_window,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import qwen3
from shardnet.model.families.family import Family, GgufFormat, Stacking, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import (
    ExpertNames,
    Table,
    attention,
    head_norms,
    pre_norms,
    sparse_mlp,
)

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

EXPERTS = ExpertNames()


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3MoeConfig. A window that is switched on is in all layers, unlike Qwen3's."""
    config = read_decoder(fields, n_kv_heads=4, max_positions=32768)
    fields.require("use_qk_norm", only=True)
    fields.require("qkv_bias", only=False)
    fields.require("shared_expert_intermediate_size", 0)
    fields.ignore("max_window_layers")
    window = read_window(fields, 4096)
    is_used = fields.take("use_sliding_window", bool, False)
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 128, 8)
    layers = read_sparse_layers(fields, config.n_layers)
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=fields.positive("moe_intermediate_size", 768),
        normalize_top_k=fields.take("norm_topk_prob", bool, False),
        layers=layers,
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=(window if is_used else None,) * config.n_layers,
        experts=experts if layers else None,
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Qwen3's parameters, in layers with experts a router and these for the MLP."""
    if config.layer_experts(layer) is None:
        return qwen3.layer_tensors(config, layer)
    return (
        attention(config, layer)
        | head_norms(config, layer)
        | sparse_mlp(config, layer, EXPERTS)
        | pre_norms(config, layer)
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention

    if config.layer_experts(layer) is None:
        return qwen3.load_layer(config, weights, layer)
    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    sparse = load_sparse_mlp(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, sparse)


def load_sparse_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> SparseMlp:
    """Take the parameters of the router and the experts of the absolute `layer`."""
    from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp

    experts, mlp = config.layer_experts(layer), f"model.layers.{layer}.mlp"
    assert experts is not None
    return SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{mlp}.gate", precise=True)),
        experts=load_experts(config, weights, f"{mlp}.experts", experts.n_experts),
    )


def load_experts(
    config: ModelConfig, weights: WeightSource, prefix: str, n_experts: int
) -> list[GatedMlp]:
    """Take the parameters of all experts of a layer, each under Llama's names for an MLP."""
    from shardnet.model.layers.modules import GatedMlp

    return [GatedMlp.load(config, weights, f"{prefix}.{number}") for number in range(n_experts)]


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_shared_feed_forward_length", 0)
    config = read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)
    return config | {
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    experts=EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(architecture="qwen3moe", multimodal=("qwen3vlmoe",), read=read_gguf),
    pretokenizer="qwen2",
)
