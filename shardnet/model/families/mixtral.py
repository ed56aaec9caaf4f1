"""Mixtral (transformers, modeling_mixtral.py): Mistral with experts in the place of the MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import (
    has_params_experts,
    read_decoder,
    read_expert_counts,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    Factors,
    has_gguf_experts,
    read_gguf_decoder,
    read_gguf_experts,
)
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import mistral
from shardnet.model.families.family import (
    ConsolidatedFormat,
    Family,
    GgufFormat,
    Stacking,
    decoder_stage,
)
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import (
    ExpertNames,
    Table,
    attention,
    pre_norms,
    sparse_mlp,
)

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

THETA = 1e6
EXPERTS = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def read_config(fields: Fields) -> ModelConfig:
    """Read a MixtralConfig: experts in every layer, a window in all or none."""
    rope = partial(read_rope, theta=THETA)
    config = read_decoder(fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=rope)
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    return replace(
        config,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=config.intermediate_size,
            normalize_top_k=True,
            layers=tuple(range(config.n_layers)),
        ),
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention and norms, a router and its experts."""
    return attention(config, layer) | sparse_mlp(config, layer, EXPERTS) | pre_norms(config, layer)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp
    from shardnet.model.layers.modules import SelfAttention

    assert config.experts is not None
    gate = weights.linear(f"model.layers.{layer}.{EXPERTS.block}.gate", precise=True)
    sparse = SparseMlp(
        router=SoftmaxRouter.of(config.experts, gate),
        experts=load_experts(config, weights, layer),
    )
    return pre_norm_layer(
        config, weights, layer, SelfAttention.load(config, weights, layer), sparse
    )


def load_experts(config: ModelConfig, weights: WeightSource, layer: int) -> list[GatedMlp]:
    """Take the parameters of all experts of the absolute `layer`, under Mixtral's names."""
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.shards.cut import INNER_EACH, Axis

    assert config.experts is not None
    prefix = f"model.layers.{layer}.{EXPERTS.block}.experts"
    return [
        GatedMlp(
            activation=config.activation,
            gate_up_proj=weights.linear(
                f"{prefix}.{number}.{EXPERTS.gate}",
                f"{prefix}.{number}.{EXPERTS.up}",
                outputs=INNER_EACH,
            ),
            down_proj=weights.linear(f"{prefix}.{number}.{EXPERTS.down}", inputs=Axis.INNER),
        )
        for number in range(config.experts.n_experts)
    ]


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; each expert is as wide as the MLP that the model would have."""
    config = read_gguf_decoder(fields, tensors, factors) | read_gguf_experts(fields)
    inner = config["intermediate_size"]
    width = fields.positive("expert_feed_forward_length", inner)
    if width != inner:
        raise fields.unsupported("expert_feed_forward_length", width, str(inner))
    return config


def read_params(fields: Fields) -> dict[str, Any]:
    """Read Mistral's params.json with an object `moe`."""
    moe: Mapping[str, Any] = fields.take("moe", dict)
    inner = fields.inner("moe", moe)
    config = {
        "num_local_experts": inner.positive("num_experts"),
        "num_experts_per_tok": inner.positive("num_experts_per_tok"),
        "rope_theta": fields.number("rope_theta", THETA, within=THETAS),
    }
    inner.note_the_rest()
    return config | mistral.read_params(fields)


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    experts=EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="llama",
        claims=has_gguf_experts,
        read=read_gguf,
        interleaved_rotary=True,
    ),
    consolidated=ConsolidatedFormat(
        claims=lambda fields: not fields.given("multiple_of") and has_params_experts(fields),
        read=read_params,
    ),
)
