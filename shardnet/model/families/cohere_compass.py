"""North Micro (transformers, modeling_cohere_compass.py): Command A whose kinds of layers differ.

Layers with a window and those without turn by objects of their own, or not at all, and in halves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, NormKind, Rope
from shardnet.model.config.rope import read_scaling
from shardnet.model.families.dense_table import COHERE
from shardnet.model.families.layout import record

_PLAIN: Final[dict[str, dict[str, Any]]] = {FULL: {}, SLIDING: {}}


def _read_config(fields: Fields) -> ModelConfig:
    """Read a CohereCompassTextConfig."""
    config = read_decoder(
        fields,
        max_positions=8192,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        is_tied=True,
        rope=partial(_read_rope, FULL),
    )
    windows = read_windows(fields, config.n_layers, read_window(fields, 4096), lambda _: False)
    ropes = fields.take("rope_parameters", dict, _PLAIN)
    unturned = [ropes.get(kind) is None for kind in (FULL, SLIDING)]
    scale = fields.optional_number("logit_scale")
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        norm_kind=NormKind.CENTRED,
        has_parallel_mlp=True,
        windows=windows,
        local_rope=_read_rope(SLIDING, fields, config.max_positions, config.head_size),
        nope_layers=tuple(
            layer for layer, window in enumerate(windows) if unturned[window is not None]
        ),
        logit_divisor=1.0 if scale is None else 1 / scale,
    )


def _read_rope(kind: str, fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the rotary positions of one kind of layers, plain ones where these have none."""
    both = fields.inner("rope_parameters", fields.take("rope_parameters", dict, _PLAIN))
    own = both.inner(kind, both.take(kind, dict, {}))
    both.ignore(FULL, SLIDING, "rope_theta", "rope_type")  # those outside are of no layer
    both.note_the_rest()
    plain = Rope(theta=own.number("rope_theta", 10000.0, within=THETAS))
    return read_scaling(own, plain, max_positions=max_positions, head_size=head_size)


FAMILY = record(
    "cohere_compass_text",
    "CohereCompassForCausalLM",
    _read_config,
    COHERE,
    has_whole_heads=True,
)
