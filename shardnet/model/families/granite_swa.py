"""Granite with windows (transformers, modeling_granite_swa.py), dense and with experts.

Three of four layers have one, all have attention sinks, and each layer says its rotary base, or
that it has no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import read_decoder, read_window, read_windows
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS, THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.families import granite
from shardnet.model.families.family import Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.sparse_table import GRANITE_MLP, read_granite_moe
from shardnet.model.families.tensor_shapes import ExpertNames

_NAMES: Final = (
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".block_sparse_moe.router.", ".mlp.gate."),
)


def _read_dense(fields: Fields) -> ModelConfig:
    """Read a GraniteSWAConfig."""
    config = read_decoder(fields, n_kv_heads=4, max_positions=8192, norm_eps=1e-5, is_tied=True)
    biases = {key: fields.take(key, bool, False) for key in ("attention_bias", "mlp_bias")}
    return _read_layers(fields, granite.read_multipliers(fields, replace(config, **biases)))


def _read_sparse(fields: Fields) -> ModelConfig:
    """Read a GraniteMoeSWAConfig."""
    return _read_layers(fields, read_granite_moe(fields))


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
