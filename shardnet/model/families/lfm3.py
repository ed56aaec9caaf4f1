"""LFM3 (transformers, modeling_lfm3.py): LFM2's convolutions, attention with a gate for each head.

Attention has norms over heads; some of it has a window and turns by another base, the other layers
turn half of their columns. Four norms a layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import FULL, SLIDING, read_decoder, read_layer_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import gemma4, lfm2
from shardnet.model.families.layout import record
from shardnet.model.families.parts import GATED_HEADS

_PERIOD: Final = 4
_ROPES: Final[dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}

_read_rope = partial(gemma4.read_rope, ropes=_ROPES)


def _covers(fields: Fields) -> bool:
    """Whether attention has gates, and sub-layers have norms behind them."""
    gates = fields.take("use_attention_gate", bool, True)
    after = fields.take("use_sandwich_norm", bool, True)
    return bool(gates and after)


def _read_config(fields: Fields) -> ModelConfig:
    """Read an Lfm3Config."""
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=128000,
        norm_key="norm_eps",
        norm_eps=1e-5,
        head_size=128,
        intermediate_size=7680,
        activation_key=None,
        is_tied=True,
        rope=partial(_read_rope, FULL),
    )
    kinds = read_layer_kinds(fields, config.n_layers, FULL, SLIDING, lfm2.CONV)
    kinds = kinds or [_usual_kind(layer) for layer in range(config.n_layers)]
    window = fields.positive("sliding_window", 256)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == lfm2.CONV)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        local_rope=_read_rope(SLIDING, fields, config.max_positions, config.head_size),
        short_conv=lfm2.read_conv(fields, config.hidden_size, layers, n_taps=7),
    )


def _usual_kind(layer: int) -> str:
    """Return what a layer has where no key says it."""
    if layer % _PERIOD == 2:
        return FULL
    return SLIDING if layer and layer % _PERIOD == 0 else lfm2.CONV


FAMILY = record(
    "lfm3",
    "Lfm3ForCausalLM",
    _read_config,
    replace(
        lfm2.LAYOUT,
        attention=lfm2.conv_or(GATED_HEADS),
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    ),
    covers=_covers,
)
