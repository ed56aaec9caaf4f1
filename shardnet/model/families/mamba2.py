"""Hybrids of Mamba-2 and attention: Bamba, Granite 4 and Nemotron-H (transformers, modeling_*.py).

Knows their keys, defaults and parts. Must not know files, nor torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import (
    FULL,
    LINEAR,
    check_state_size,
    read_decoder,
    read_expert_counts,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_kv_heads, read_gguf_sizes
from shardnet.model.config.model_config import Activation, DeltaNet, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import granite
from shardnet.model.families.expert_parts import with_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import ATTENTION, Part, gated_part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.gated_delta import GatedDeltaNet

MOST_TAPS: Final = 64


def _read_mamba(fields: Fields, config: ModelConfig, kinds: list[Any]) -> DeltaNet | None:
    """Read the sizes of Mamba-2 with Bamba's keys; None where every layer has attention."""
    layers = layers_of(fields, kinds, config.n_layers, LINEAR, "mamba")
    inner = fields.positive("mamba_expand", 2) * config.hidden_size
    return read_mamba(fields, layers, inner)


def read_mamba(fields: Fields, layers: tuple[int, ...], inner: int) -> DeltaNet | None:
    """Read the sizes of Mamba-2 with Bamba's keys, of `inner` columns. Raises as `read_sizes`."""
    n_heads = fields.positive("mamba_n_heads", 128)
    size = fields.take("mamba_d_head", (int, str), "auto")
    if inner % n_heads or size not in ("auto", inner // n_heads):
        raise fields.damaged(f"mamba_d_head {shown(size)} does not go with {inner} columns")
    fields.ignore("mamba_chunk_size")
    return read_sizes(
        fields,
        layers,
        n_heads=n_heads,
        head_size=inner // n_heads,
        n_groups=fields.positive("mamba_n_groups", 1),
        state_size=fields.positive("mamba_d_state", 256),
        n_taps=fields.positive("mamba_d_conv", 4, at_most=MOST_TAPS),
    )


def read_sizes(
    fields: Fields,
    layers: tuple[int, ...],
    *,
    n_heads: int,
    head_size: int,
    n_groups: int,
    state_size: int,
    n_taps: int,
) -> DeltaNet | None:
    """Make the sizes of Mamba-2 in `layers`, None where there are none of these.

    Raises CheckpointError for sizes that do not fit together, UnsupportedModelError where steps
    have a limit.
    """
    limit = fields.take("time_step_limit", list, [0.0, _INFINITE])
    if limit[:1] != [0.0] or limit[1:] not in ([float("inf")], [_INFINITE]):
        raise fields.unsupported("time_step_limit", limit, "none, from 0 to infinity")
    if n_heads % n_groups:
        raise fields.damaged(f"{n_groups} groups do not go with {n_heads} heads of Mamba-2")
    read = DeltaNet(
        n_key_heads=n_groups,
        n_value_heads=n_heads,
        key_size=state_size,
        value_size=head_size,
        n_taps=n_taps,
        layers=layers,
        is_mamba=True,
    )
    check_state_size(fields, read)
    return read if layers else None


_INFINITE: Final = {"__float__": "Infinity"}
"""As transformers writes it into JSON."""


def layers_of(fields: Fields, kinds: list[Any], n_layers: int, *wanted: str) -> tuple[int, ...]:
    """Return which layers are of one of the `wanted` kinds. Raises CheckpointError for others."""
    if len(kinds) != n_layers:
        raise fields.damaged(f"layer_types has {len(kinds)} entries for {n_layers} layers")
    for kind in kinds:
        if kind not in _KINDS:
            raise fields.unsupported("layer_types", kind, ", ".join(_KINDS))
    return tuple(n for n in range(n_layers) if kinds[n] in wanted)


_KINDS: Final = (FULL, LINEAR, "mamba", "attention", "moe", "mlp")


def _read_bamba(fields: Fields) -> ModelConfig:
    """Read a BambaConfig: half of each head turns, whatever the config says."""
    fields.ignore("attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient")
    fields.ignore("partial_rotary_factor")
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=262144,
        norm_eps=1e-5,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    indices = fields.take("attn_layer_indices", list, [])
    fields.ignore("layers_block_type", "layer_types")
    kinds = [FULL if layer in indices else LINEAR for layer in range(config.n_layers)]
    _require_biases(fields)
    return replace(
        config,
        mlp_bias=fields.take("mlp_bias", bool, False),
        delta_net=_read_mamba(fields, config, kinds),
    )


def _require_biases(fields: Fields) -> None:
    fields.require("mamba_conv_bias", True)
    fields.require("mamba_proj_bias", False)


def _read_granite_hybrid(fields: Fields) -> ModelConfig:
    """Read a GraniteMoeHybridConfig: as a rule without positions, and perhaps without experts."""
    shared = fields.positive("shared_intermediate_size", 1024)
    config = replace(granite.read_config(fields), intermediate_size=shared)
    inner = fields.positive("intermediate_size")
    kinds = fields.take("layer_types", list, None)
    kinds = fields.take("layers_block_type", list, kinds or [LINEAR] * config.n_layers)
    position = fields.one_of("position_embedding_type", ("nope", "rope"), "nope")
    if fields.take("num_local_experts", int, 8):
        counts = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
        config = with_experts(
            config, *counts, intermediate_size=inner, shared_intermediate_size=shared
        )
    fields.ignore("num_experts_per_tok", "normalization_function", "init_method")
    _require_biases(fields)
    return replace(
        config,
        nope_layers=tuple(range(config.n_layers)) if position == "nope" else (),
        delta_net=_read_mamba(fields, config, kinds),
    )


def mixer_tensors(config: ModelConfig, prefix: str) -> Table:
    """Name the parameters of Mamba-2 below `prefix`."""
    own = config.delta_net
    assert own is not None
    width = own.value_width + own.mixed_width + own.n_value_heads
    shapes = {
        "in_proj": (width, config.hidden_size),
        "out_proj": (config.hidden_size, own.value_width),
    }
    return linears(prefix, shapes) | {
        f"{prefix}.conv1d.weight": (own.mixed_width, 1, own.n_taps),
        f"{prefix}.conv1d.bias": (own.mixed_width,),
        f"{prefix}.A_log": (own.n_value_heads,),
        f"{prefix}.D": (own.n_value_heads,),
        f"{prefix}.dt_bias": (own.n_value_heads,),
        **({f"{prefix}.norm.weight": (own.value_width,)} if own.has_norm else {}),
    }


def load_mixer(config: ModelConfig, weights: WeightSource, prefix: str) -> GatedDeltaNet:
    """Take the parameters of Mamba-2 below `prefix`."""
    import torch

    from shardnet.model.kernels.recurrence import RecurrenceParameters
    from shardnet.model.layers.norms import HeadNorm
    from shardnet.model.mixers.gated_delta import GatedDeltaNet, MambaProjection

    own = config.delta_net
    assert own is not None
    keys = own.value_width + own.key_width
    order = torch.cat(  # queries, keys, values
        [torch.arange(*ends) for ends in ((keys, own.mixed_width), (own.value_width, keys))]
        + [torch.arange(own.value_width)]
    )
    taps = weights.parameter(f"{prefix}.conv1d.weight").squeeze(1).T
    order = order.to(taps.device)
    parameters = RecurrenceParameters(
        taps=taps[:, order].contiguous(),
        taps_bias=weights.parameter(f"{prefix}.conv1d.bias")[order].contiguous(),
        decay_rate=weights.parameter(f"{prefix}.A_log").exp().neg(),
        decay_bias=weights.parameter(f"{prefix}.dt_bias"),
        skip=weights.parameter(f"{prefix}.D"),
        norm_weight=None,
        norm_eps=config.norm_eps,
    )
    norm = None
    if own.has_norm:
        weight = weights.parameter(f"{prefix}.norm.weight").view(own.n_key_heads, -1)
        norm = HeadNorm(weight=weight, eps=config.norm_eps)
    return GatedDeltaNet.of(
        own,
        Activation.SILU,
        MambaProjection(config=own, in_proj=weights.linear(f"{prefix}.in_proj")),
        parameters,
        weights.linear(f"{prefix}.out_proj"),
        norm,
    )


def has_mamba(config: ModelConfig, layer: int) -> bool:
    """Return whether the absolute `layer` has Mamba-2."""
    return config.delta_net is not None and layer in config.delta_net.layers


def _either_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Mamba-2 or attention."""
    if has_mamba(config, layer):
        return mixer_tensors(config, f"model.layers.{layer}.mamba")
    return ATTENTION.tensors(config, layer)


def _load_either(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
    if has_mamba(config, layer):
        return load_mixer(config, weights, f"model.layers.{layer}.mamba")
    made: Attention = ATTENTION.load(config, weights, layer)
    return made


_MIXER: Final = Part(tensors=_either_tensors, load=_load_either)


FEED_FORWARD: Final = gated_part("feed_forward")


# GGUF

OF_MAMBA: Final = (
    ("in_proj.weight", "ssm_in.weight"),
    ("out_proj.weight", "ssm_out.weight"),
    ("conv1d.weight", "ssm_conv1d.weight"),
    ("conv1d.bias", "ssm_conv1d.bias"),
    ("dt_bias", "ssm_dt.bias"),
    ("A_log", "ssm_a"),
    ("D", "ssm_d"),
    ("norm.weight", "ssm_norm.weight"),
)


def read_gguf_mamba(fields: Fields) -> dict[str, int]:
    """Read the sizes of Mamba-2: heads, columns of all, groups, columns of a state, taps."""
    return {
        "heads": fields.positive("ssm.time_step_rank"),
        "inner": fields.positive("ssm.inner_size"),
        "groups": fields.positive("ssm.group_count"),
        "state": fields.positive("ssm.state_size"),
        "taps": fields.positive("ssm.conv_kernel"),
    }


def _read_granite_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of a model whose attention has no positions."""
    fields.require("rope.scaling.finetuned", False)
    fields.ignore("attention.key_length", "attention.value_length", "rope.dimension_count")
    config = read_gguf_sizes(fields)
    n_heads, has_heads = read_gguf_kv_heads(fields, config["num_hidden_layers"])
    mamba = read_gguf_mamba(fields)
    inner, n_experts = config["intermediate_size"], fields.take("expert_count", int, 0)
    fields.require("expert_gating_func", 1)  # softmax
    return (
        config
        | granite.read_gguf_multipliers(fields)
        | {
            "num_key_value_heads": n_heads,
            "layer_types": [FULL if has_own else LINEAR for has_own in has_heads],
            "shared_intermediate_size": fields.positive("expert_shared_feed_forward_length", inner),
            "num_local_experts": n_experts,
            "num_experts_per_tok": fields.take("expert_used_count", int, 0),
            "mamba_n_heads": mamba["heads"],
            "mamba_expand": mamba["inner"] // config["hidden_size"],
            "mamba_n_groups": mamba["groups"],
            "mamba_d_state": mamba["state"],
            "mamba_d_conv": mamba["taps"],
        }
    )


FAMILIES: Final = (
    record(
        "bamba",
        "BambaForCausalLM",
        _read_bamba,
        Layout(
            attention=_MIXER,
            mlp=FEED_FORWARD,
            norms=("input_layernorm", "", "pre_ff_layernorm", ""),
            final_norm="model.final_layernorm",
        ),
    ),
    record(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _read_granite_hybrid,
        Layout(attention=_MIXER, mlp=granite.GRANITE_MLP),
        renamed_tensors=granite.GRANITE_NAMES,
        experts=ExpertNames(),
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(
            architecture="granitehybrid",
            read=_read_granite_gguf,
            interleaved_rotary=True,
            decay=".A_log",
            block_names=tuple((f"mamba.{own}", stored) for own, stored in OF_MAMBA),
            joined_names=(
                (
                    "shared_mlp.input_linear.weight",
                    (
                        *("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
                        *("ffn_gate.weight", "ffn_up.weight"),
                    ),
                ),
                ("shared_mlp.output_linear.weight", ("ffn_down_shexp.weight", "ffn_down.weight")),
            ),
        ),
    ),
)
