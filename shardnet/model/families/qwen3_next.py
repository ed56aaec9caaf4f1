"""Qwen3-Next (transformers, modeling_qwen3_next.py): gated DeltaNets, and experts.

Most layers have a gated DeltaNet, every fourth has attention with gates. Qwen 3.5 is built from the
same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_delta_net,
    read_expert_counts,
    read_sparse_layers,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    Factors,
    read_gguf_decoder,
    read_gguf_delta_net,
    read_gguf_experts,
)
from shardnet.model.config.model_config import DeltaNet, Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families.family import Family, GgufFormat, MtpNames, Stacking, decoder_stage
from shardnet.model.families.qwen2_moe import EXPERTS, load_shared_mlp, shared_mlp
from shardnet.model.families.tensor_shapes import (
    Table,
    attention,
    head_norms,
    linears,
    mlp,
    pre_norms,
)

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.gated_delta import Project
    from shardnet.model.layers.modules import Attention, GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

    LoadProjections = Callable[[DeltaNet, WeightSource, str], Project]
    """Takes the linears of a DeltaNet below a prefix."""

_SHARE = 0.25


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3NextConfig."""
    config = read_hybrid(fields, n_kv_heads=2, intermediate_size=5632)
    layers = read_sparse_layers(fields, config.n_layers)
    normalizes = fields.take("norm_topk_prob", bool, True)
    return with_experts(fields, config, layers, n_experts=512, top_k=10, normalizes=normalizes)


def read_hybrid(fields: Fields, *, n_kv_heads: int, intermediate_size: int) -> ModelConfig:
    """Read what Qwen3-Next and Qwen 3.5 say alike: norms store what exceeds 1.

    `n_kv_heads` and `intermediate_size` are defaults.
    """
    fields.require("attn_output_gate", True)
    config = read_decoder(
        fields,
        n_kv_heads=n_kv_heads,
        max_positions=32768,
        head_size=256,
        intermediate_size=intermediate_size,
        rope=partial(read_rope, may_be_partial=True, share=_SHARE),
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        norm_offset=1.0,
        has_gates=True,
        delta_net=read_delta_net(fields, config.n_layers),
    )


def with_experts(
    fields: Fields,
    config: ModelConfig,
    layers: tuple[int, ...],
    *,
    n_experts: int,
    top_k: int,
    normalizes: bool,
) -> ModelConfig:
    """Add the experts of `layers`; `n_experts` and `top_k` are defaults."""
    n_found, n_chosen = read_expert_counts(
        fields, ("num_experts", "num_local_experts"), n_experts, top_k
    )
    experts = Experts(
        n_experts=n_found,
        top_k=n_chosen,
        intermediate_size=fields.positive("moe_intermediate_size", 512),
        normalize_top_k=normalizes,
        shared_intermediate_size=fields.positive("shared_expert_intermediate_size", 512),
        layers=layers,
    )
    return replace(config, experts=experts if layers else None)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the parameters: queries, keys, values and gate of the DeltaNet are one linear.

    In GGUF they are two, without groups.
    """
    own = config.delta_net
    if own is not None and own.has_split_gate:
        shapes = {
            "in_proj_qkv": (own.mixed_width, config.hidden_size),
            "in_proj_z": (own.value_width, config.hidden_size),
            "in_proj_ba": (2 * own.n_value_heads, config.hidden_size),
        }
        return hybrid_tensors(config, layer, shapes)
    shapes = (
        {}
        if own is None
        else {
            "in_proj_qkvz": (own.mixed_width + own.value_width, config.hidden_size),
            "in_proj_ba": (2 * own.n_value_heads, config.hidden_size),
        }
    )
    return hybrid_tensors(config, layer, shapes)


def hybrid_tensors(
    config: ModelConfig, layer: int, projections: dict[str, tuple[int, int]]
) -> Table:
    """Name the parameters of a layer whose DeltaNet, if it has one, has these `projections`."""
    return (
        _mixer_tensors(config, layer, projections)
        | _mlp_tensors(config, layer)
        | pre_norms(config, layer)
    )


def _mixer_tensors(
    config: ModelConfig, layer: int, projections: dict[str, tuple[int, int]]
) -> Table:
    own = config.delta_net
    if own is None or layer not in own.layers:
        attn = f"model.layers.{layer}.self_attn.q_proj"
        tensors = attention(config, layer) | head_norms(config, layer)
        doubled = {
            name: (2 * shape[0], *shape[1:])
            for name, shape in tensors.items()
            if name.startswith(f"{attn}.")
        }
        return tensors | doubled
    prefix = f"model.layers.{layer}.linear_attn"
    return linears(prefix, projections) | {
        f"{prefix}.conv1d.weight": (own.mixed_width, 1, own.n_taps),
        f"{prefix}.A_log": (own.n_value_heads,),
        f"{prefix}.dt_bias": (own.n_value_heads,),
        f"{prefix}.norm.weight": (own.value_size,),
        f"{prefix}.out_proj.weight": (config.hidden_size, own.value_width),
    }


def _mlp_tensors(config: ModelConfig, layer: int) -> Table:
    experts = config.layer_experts(layer)
    return mlp(config, layer) if experts is None else shared_mlp(config, layer, experts)


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    return load_hybrid(config, weights, layer, _projections)


def load_hybrid(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    projections: LoadProjections,
) -> Layer:
    """Take the parameters of a layer; `projections` takes those of its DeltaNet."""
    from shardnet.model.layers.decoder_layer import Layer, Residual
    from shardnet.model.layers.mixed_attention import GatedAttention
    from shardnet.model.layers.modules import GatedMlp

    own, prefix = config.delta_net, f"model.layers.{layer}"
    mixer: Attention
    if own is not None and layer in own.layers:
        attn = f"{prefix}.linear_attn"
        mixer = _delta_net(config, own, weights, attn, projections(own, weights, attn))
    else:
        mixer = GatedAttention.load(config, weights, layer)
    experts = config.layer_experts(layer)
    dense: GatedMlp | SparseMlp
    if experts is None:
        dense = GatedMlp.load(config, weights, f"{prefix}.mlp")
    else:
        dense = load_shared_mlp(config, weights, layer, experts)
    first, second = (
        weights.norm(f"{prefix}.{name}", config.norm_eps, config.norm_offset)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Layer.of(Residual(before=first), mixer, Residual(before=second), dense)


def _delta_net(
    config: ModelConfig, own: DeltaNet, weights: WeightSource, prefix: str, project: Project
) -> Attention:
    from shardnet.model.kernels.recurrence import RecurrenceParameters
    from shardnet.model.layers.gated_delta import GatedDeltaNet

    parameters = RecurrenceParameters(
        taps=weights.parameter(f"{prefix}.conv1d.weight").squeeze(1).T.contiguous(),
        decay_rate=weights.parameter(f"{prefix}.A_log").exp().neg(),
        decay_bias=weights.parameter(f"{prefix}.dt_bias"),
        norm_weight=weights.parameter(f"{prefix}.norm.weight"),
        norm_eps=config.norm_eps,
    )
    out_proj = weights.linear(f"{prefix}.out_proj")
    return GatedDeltaNet.of(own, config.activation, project, parameters, out_proj)


def _projections(own: DeltaNet, weights: WeightSource, prefix: str) -> Project:
    from shardnet.model.layers.gated_delta import Projections

    names = ("in_proj_qkv", "in_proj_z") if own.has_split_gate else ("in_proj_qkvz",)
    return Projections(
        config=own,
        qkvz_proj=weights.linear(*(f"{prefix}.{name}" for name in names)),
        ba_proj=weights.linear(f"{prefix}.in_proj_ba", precise=True),
        groups_qkvz=not own.has_split_gate,
        groups_ba=True,
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_hybrid(fields, tensors, factors) | read_gguf_delta_net(fields)


def read_gguf_hybrid(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read what models with experts say, which need not be the width of an MLP no layer has."""
    inner = fields.positive("expert_feed_forward_length")
    fields.require("expert_weights_norm", True)
    shared = fields.positive("expert_shared_feed_forward_length")
    config = read_gguf_decoder(
        fields, tensors, factors, intermediate_size=inner, may_be_partial=True
    )
    sizes = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": shared}
    return config | read_gguf_experts(fields) | sizes


def gguf_format(
    architecture: str, read: Callable[[Fields, Container[str], Factors], dict[str, Any]]
) -> GgufFormat:
    """Say how the converter writes these models, whose metadata `read` reads."""
    return GgufFormat(
        architecture=architecture,
        read=read,
        plain_norm=".linear_attn.norm.weight",
        decay=".A_log",
        renamed=((".dt_bias", ".dt_proj.bias"),),
    )


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    mtp=MtpNames.PREFIX,
    experts=EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=gguf_format("qwen3next", read_gguf),
    pretokenizer="qwen2",
)
