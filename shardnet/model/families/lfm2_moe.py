"""LFM2 with experts (transformers, modeling_lfm2_moe.py), chosen by sigmoid and a bias."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import lfm2
from shardnet.model.families.family import Family, GgufFormat, Stacking, decoder_stage
from shardnet.model.families.tensor_shapes import ExpertNames, Table, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.weight_source import WeightSource

EXPERTS: Final = ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2")


def read_config(fields: Fields) -> ModelConfig:
    """Read an Lfm2MoeConfig: the first layers have a dense MLP."""
    config = lfm2.read_hybrid(fields, intermediate_size=7168)
    n_experts, top_k = read_expert_counts(fields, ("num_experts", "num_local_experts"), 32, 4)
    first = fields.take("num_dense_layers", int, 2)
    fields.require("use_expert_bias", True)
    return replace(
        config,
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=fields.positive("moe_intermediate_size", 1792),
            normalize_top_k=fields.take("norm_topk_prob", bool, True),
            output_scale=fields.number("routed_scaling_factor", 1.0),
            layers=tuple(range(max(0, first), config.n_layers)),
        ),
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name LFM2's parameters, in most layers with experts in place of the MLP."""
    experts = config.layer_experts(layer)
    if experts is None:
        return lfm2.layer_tensors(config, layer)
    bias: Table = {f"model.layers.{layer}.feed_forward.expert_bias": (experts.n_experts,)}
    return lfm2.mixer_tensors(config, layer) | sparse_mlp(config, layer, EXPERTS) | bias


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    experts = config.layer_experts(layer)
    if experts is None:
        return lfm2.load_layer(config, weights, layer)
    return lfm2.load_hybrid(config, weights, layer, _load_experts(config, experts, weights, layer))


def _load_experts(
    config: ModelConfig, experts: Experts, weights: WeightSource, layer: int
) -> SparseMlp:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.group_routers import BestTwoRouter

    prefix = f"model.layers.{layer}.feed_forward"
    router = BestTwoRouter(
        experts=experts,
        gate=weights.linear(f"{prefix}.gate", wide=True),
        bias=weights.parameter(f"{prefix}.expert_bias"),
    )
    each = [
        lfm2.load_gated(config, weights, f"{prefix}.experts.{number}")
        for number in range(experts.n_experts)
    ]
    return SparseMlp(router=router, experts=each)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return lfm2.read_gguf(fields, tensors, factors) | {
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "num_dense_layers": fields.take("leading_dense_block_count", int, 0),
    }


FAMILY = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer, lfm2.FINAL_NORM),
    head_tensors=lfm2.head_tensors,
    experts=EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="lfm2moe", read=read_gguf, renamed=(("expert_bias", "expert_bias.bias"),)
    ),
)
