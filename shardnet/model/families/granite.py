"""Granite's families (transformers, modeling_granite.py, _granitemoe.py, _granite_swa.py).

They are Llama with a multiplier in every place, dense and with experts. Those with windows have one
in three of four layers and attention sinks in all, and each layer says its rotary base, or that it
has no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import (
    read_decoder,
    read_expert_counts,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder, read_gguf_experts
from shardnet.model.config.limits import MAX_LAYERS, THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.families import llama
from shardnet.model.families.expert_parts import EXPERTS, SOFTMAX_EXPERTS, STACKED, with_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, gated, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

_SSM: Final = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")


def read_config(fields: Fields) -> ModelConfig:
    """Read a GraniteConfig."""
    return read_multipliers(fields, llama.read_config(fields))


def read_multipliers(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Add the multipliers to `config`."""
    return replace(
        config,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata, with experts or without."""
    fields.require("rope.scaling.finetuned", only=True)  # false where there are no positions
    config = read_gguf_decoder(fields, has_biases=True)
    return config | read_gguf_multipliers(fields)


def _read_dense_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. Granite 4 without Mamba says of which sizes Mamba would be."""
    fields.ignore(*(f"ssm.{key}" for key in _SSM))
    fields.require("expert_count", 0)
    fields.ignore("expert_used_count", "expert_shared_feed_forward_length")
    return read_gguf(fields)


def read_gguf_multipliers(fields: Fields) -> dict[str, Any]:
    """Read the multipliers, every one of which has to stand in the metadata."""
    return {
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
    }


_SHARED: Final = ("input_linear", "input_linear", "output_linear")


def _read_granite_moe(fields: Fields) -> ModelConfig:
    """Read a GraniteMoeConfig, with a shared expert or without."""
    config = read_config(fields)
    counts = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    shared: int = fields.take("shared_intermediate_size", int, 0)
    return with_experts(config, *counts, shared_intermediate_size=max(0, shared))


def _granite_mlp(config: ModelConfig, layer: int) -> Table:
    """Name a router, its experts and a shared one, whose gate and up are one linear.

    A model without experts has the last alone, as wide as its MLP.
    """
    own = config.experts
    inner = config.intermediate_size if own is None else own.shared_intermediate_size
    prefix = f"model.layers.{layer}.shared_mlp"
    shared = gated(config, prefix, inner, names=_SHARED) if inner else {}
    return shared if own is None else sparse_mlp(config, layer, EXPERTS) | shared


def _load_granite_mlp(
    config: ModelConfig, weights: WeightSource, layer: int
) -> SparseMlp | GatedMlp:
    from shardnet.model.layers.modules import GatedMlp

    own, prefix = config.experts, f"model.layers.{layer}.shared_mlp"
    if own is not None:
        alone = replace(config, experts=replace(own, shared_intermediate_size=0))
        sparse: SparseMlp = SOFTMAX_EXPERTS.load(alone, weights, layer)
        if not own.shared_intermediate_size:
            return sparse
    shared = GatedMlp.load(config, weights, prefix, _SHARED)
    return shared if own is None else replace(sparse, shared=shared)


def _read_granite_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; experts are as wide as the MLP would be."""
    config = read_gguf(fields) | read_gguf_experts(fields)
    shared = fields.take("expert_shared_feed_forward_length", int, 0)
    return config | {"shared_intermediate_size": shared}


GRANITE_MLP: Final = Part(tensors=_granite_mlp, load=_load_granite_mlp)


GRANITE_NAMES: Final = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
)


_NAMES: Final = (
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".block_sparse_moe.router.", ".mlp.gate."),
)


def _read_dense(fields: Fields) -> ModelConfig:
    """Read a GraniteSWAConfig."""
    config = read_decoder(
        fields, n_kv_heads=4, max_positions=8192, norm_eps=1e-5, is_tied=True, mlp_bias=False
    )
    return _read_layers(fields, read_multipliers(fields, config))


def _read_sparse(fields: Fields) -> ModelConfig:
    """Read a GraniteMoeSWAConfig."""
    return _read_layers(fields, _read_granite_moe(fields))


def _read_layers(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Add to `config` which layers have windows, and what positions."""
    windows = _read_windows(fields, config.n_layers)
    given = fields.take("layer_rope_theta", list, None)
    config = replace(config, has_sinks=True, windows=windows)
    if given is None:
        return config
    expected = f"{config.n_layers} of 0 or {THETAS}"
    are_bases = all(type(n) in (int, float) and (n == 0 or _is_base(n)) for n in given)
    if len(given) != config.n_layers or not are_bases:
        raise fields.damaged(f"layer_rope_theta is {shown(given)}, expected {expected}")
    local, full = (_turned(config.rope, bases) for bases in _bases(given, windows))
    return replace(
        config,
        rope=full,
        local_rope=None if local == full else local,
        nope_layers=tuple(layer for layer, base in enumerate(given) if not base),
    )


def _read_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    return read_windows(fields, n_layers, read_window(fields, 128), lambda layer: layer % 4 != 0)


def _is_base(value: float) -> bool:
    return THETAS.least <= value <= THETAS.most


def _bases(given: list[Any], windows: tuple[int | None, ...]) -> tuple[set[float], set[float]]:
    """Return the bases of layers with a window and of the others, without the 0 for none."""
    both: tuple[set[float], set[float]] = set(), set()
    for base, window in zip(given, windows, strict=True):
        if base:
            both[window is None].add(float(base))
    return both


def _turned(rope: Rope | None, bases: set[float]) -> Rope | None:
    assert rope is not None, "all configs of these families have one"
    return replace(rope, theta=next(iter(bases))) if bases else rope


def _covers(fields: Fields) -> bool:
    """Whether the layers with a window turn by one base, and so do the others."""
    given = fields.take("layer_rope_theta", list, None) or []
    n_layers = fields.positive("num_hidden_layers", at_most=MAX_LAYERS)
    if len(given) != n_layers or not all(type(base) in (int, float) for base in given):
        return True
    return all(len(bases) <= 1 for bases in _bases(given, _read_windows(fields, n_layers)))


FAMILIES: Final = (
    record(
        "granite",
        "GraniteForCausalLM",
        read_config,
        gguf=GgufFormat(architecture="granite", read=_read_dense_gguf, interleaved_rotary=True),
    ),
    record(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _read_granite_moe,
        Layout(mlp=GRANITE_MLP),
        renamed_tensors=GRANITE_NAMES,
        gguf=GgufFormat(
            architecture="granitemoe",
            claims=lambda fields: not fields.given("expert_shared_feed_forward_length"),
            read=_read_granite_moe_gguf,
            interleaved_rotary=True,
        ),
        **STACKED,
    ),
    record(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        _read_granite_moe,
        Layout(mlp=GRANITE_MLP),
        renamed_tensors=GRANITE_NAMES,
        gguf=GgufFormat(
            architecture="granitemoe",
            claims=lambda fields: fields.given("expert_shared_feed_forward_length"),
            read=_read_granite_moe_gguf,
            interleaved_rotary=True,
            joined_names=(
                (
                    "shared_mlp.input_linear.weight",
                    ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
                ),
                ("shared_mlp.output_linear.weight", ("ffn_down_shexp.weight",)),
            ),
        ),
        **STACKED,
    ),
    record("granite_swa", "GraniteSWAForCausalLM", _read_dense, covers=_covers),
    record(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        _read_sparse,
        Layout(mlp=GRANITE_MLP),
        covers=_covers,
        renamed_tensors=_NAMES,
        experts=ExpertNames(),
        stacking=Stacking.CONCATENATED,
    ),
)
