"""OLMo-3 (transformers, modeling_olmo3.py): OLMo-2 with sliding windows in three of four layers.

Only the layers with full attention have scaled rotary positions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

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
from shardnet.model.families import olmo2
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import record

THETA = 500000.0


def read_config(fields: Fields) -> ModelConfig:
    """Read an Olmo3Config."""
    config = read_decoder(fields, norm_eps=1e-5, rope=partial(read_full_rope, theta=THETA))
    window = read_window(fields, 4096)
    theta = fields.number("rope_theta", THETA, within=THETAS)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=read_windows(fields, config.n_layers, window, lambda n: (n + 1) % 4 != 0),
        local_rope=read_sliding_rope(fields, config, theta=theta),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata of a file with sliding windows; llama.cpp fixes which layers have them."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.positive("attention.sliding_window")
    config = read_gguf_decoder(fields, tensors, factors)
    fields.require("rope.freq_base_swa", config["rope_theta"])
    return config | {"sliding_window": window}


FAMILY = record(
    "olmo3",
    "Olmo3ForCausalLM",
    read_config,
    olmo2.LAYOUT,
    gguf=GgufFormat(
        architecture="olmo2",
        claims=lambda fields: fields.given("attention.sliding_window"),
        read=read_gguf,
    ),
    has_whole_heads=True,
)
