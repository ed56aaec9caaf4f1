"""OLMo-2 and OLMo-3 (transformers, modeling_olmo2.py, _olmo3.py): norms behind sub-layers.

Norms are over all queries. OLMo-3 has sliding windows in three of four layers, and scaled rotary
positions in the others alone.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_full_rope,
    read_sliding_rope,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import WHOLE_HEADS

_THETA: Final = 500000.0


def read_config(fields: Fields) -> ModelConfig:
    """Read an Olmo2Config."""
    return read_decoder(fields, norm_eps=1e-5, attention_bias=False)


LAYOUT: Final = Layout(attention=WHOLE_HEADS, norms=POST_NORMS)


def _read_olmo3(fields: Fields) -> ModelConfig:
    """Read an Olmo3Config."""
    config = read_decoder(fields, norm_eps=1e-5, rope=partial(read_full_rope, theta=_THETA))
    window = read_window(fields, 4096)
    theta = fields.number("rope_theta", _THETA, within=THETAS)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=read_windows(fields, config.n_layers, window, lambda n: (n + 1) % 4 != 0),
        local_rope=read_sliding_rope(fields, config, theta=theta),
    )


def _read_olmo3_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata of a file with sliding windows; llama.cpp fixes which layers have them."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.positive("attention.sliding_window")
    config = read_gguf_decoder(fields, tensors, factors)
    fields.require("rope.freq_base_swa", config["rope_theta"])
    return config | {"sliding_window": window}


FAMILIES: Final = (
    record(
        "olmo2",
        "Olmo2ForCausalLM",
        read_config,
        LAYOUT,
        gguf=GgufFormat(
            architecture="olmo2",
            claims=lambda fields: not fields.given("attention.sliding_window"),
        ),
        has_whole_heads=True,
    ),
    record(
        "olmo3",
        "Olmo3ForCausalLM",
        _read_olmo3,
        LAYOUT,
        gguf=GgufFormat(
            architecture="olmo2",
            claims=lambda fields: fields.given("attention.sliding_window"),
            read=_read_olmo3_gguf,
        ),
        has_whole_heads=True,
    ),
)
