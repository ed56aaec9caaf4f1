"""gpt-oss (transformers, modeling_gpt_oss.py): attention sinks, experts with clamped gates.

Every other layer has a window, and there are biases everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_expert_counts,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope, read_scaling
from shardnet.model.families.expert_parts import with_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, gated, linears

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.weight_source import WeightSource

THETA = 150000.0
PUBLISHED_YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
EXPERTS = ExpertNames(gate="gate_up_proj", up="gate_up_proj")


def read_config(fields: Fields) -> ModelConfig:
    """Read a GptOssConfig."""
    fields.ignore("initial_context_length")  # says again what rope_scaling says
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=64,
        rope=_read_rope,
        attention_bias=True,
    )
    window = read_window(fields, 128)
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 128, 4)
    if fields.positive("experts_per_token", top_k) != top_k:
        raise fields.damaged("num_experts_per_tok and experts_per_token disagree")
    windows = read_windows(fields, config.n_layers, window, lambda layer: layer % 2 == 0)
    return with_experts(
        replace(config, has_sinks=True, windows=windows),
        n_experts,
        top_k,
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
    )


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the rotary positions: where none are given they are scaled as in the published ones."""
    if fields.missing("rope_parameters") and fields.missing("rope_scaling"):
        theta = fields.number("rope_theta", THETA, within=THETAS)
        published = fields.inner("rope_parameters", PUBLISHED_YARN)
        return read_scaling(
            published, Rope(theta=theta), max_positions=max_positions, head_size=head_size
        )
    return read_rope(fields, max_positions, head_size, theta=THETA)


def _mlp_tensors(config: ModelConfig, layer: int) -> Table:
    """Name a router, and experts whose gate and up are one linear."""
    assert config.experts is not None
    prefix, n_experts = f"model.layers.{layer}.mlp", config.experts.n_experts
    hidden, inner = config.hidden_size, config.experts.intermediate_size
    made = linears(prefix, {"router": (n_experts, hidden)}, with_bias=True)
    for number in range(n_experts):
        expert = f"{prefix}.experts.{number}"
        made |= gated(config, expert, inner, with_bias=True, names=EXPERTS.linears)
    return made


def _load_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> SparseMlp:
    from shardnet.model.layers.experts import ClampedMlp, SoftmaxRouter, SparseMlp
    from shardnet.model.shards.cut import INNER_EACH, Axis

    experts = config.experts
    assert experts is not None
    assert experts.swiglu_limit is not None
    prefix = f"model.layers.{layer}.mlp"
    names = [f"{prefix}.experts.{number}" for number in range(experts.n_experts)]
    return SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{prefix}.router", precise=True)),
        experts=[
            ClampedMlp(
                limit=experts.swiglu_limit,
                alpha=experts.swiglu_alpha,
                added=1.0,
                gate_up_proj=weights.linear(f"{expert}.{EXPERTS.gate}", outputs=INNER_EACH),
                down_proj=weights.linear(f"{expert}.{EXPERTS.down}", inputs=Axis.INNER),
            )
            for expert in names
        ],
    )


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. Frequencies are scaled without truncation, which no key says."""
    config = read_gguf_decoder(fields) | read_gguf_experts(fields)
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    return config | {
        "intermediate_size": fields.positive("expert_feed_forward_length"),
        "sliding_window": fields.positive("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "rope_scaling": scaling,
    }


FAMILY = record(
    "gpt_oss",
    "GptOssForCausalLM",
    read_config,
    Layout(mlp=Part(tensors=_mlp_tensors, load=_load_mlp)),
    experts=EXPERTS,
    stacking=Stacking.ALTERNATING,
    gguf=GgufFormat(architecture="gpt-oss", read=read_gguf),
)
