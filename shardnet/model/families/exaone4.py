"""EXAONE 4 (transformers, modeling_exaone4.py): OLMo-2's order of norms, Qwen3's norms over heads.

Where layers have windows, those without one have no positions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from shardnet.model.config.decoder_config import read_decoder, read_window, read_windows
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record


def read_config(fields: Fields) -> ModelConfig:
    """Read an Exaone4Config."""
    config = read_decoder(fields, n_kv_heads=32, norm_eps=1e-5, intermediate_size=16384)
    window = read_window(fields, 4096)
    period = _read_period(fields)
    windows = read_windows(
        fields, config.n_layers, window, lambda n: window is not None and (n + 1) % period != 0
    )
    full = tuple(n for n in range(config.n_layers) if windows[n] is None)
    nope = full if window else ()
    return replace(config, windows=windows, nope_layers=nope, has_head_norms=True)


def _read_period(fields: Fields) -> int:
    """Read every how many layers one has no window: a number, or L and G for each of them."""
    key = "sliding_window_pattern"
    pattern = fields.take(key, (int, str), 4)
    if isinstance(pattern, int):
        return fields.positive(key, 4) if pattern else 1
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise fields.unsupported(key, pattern, "LLLG, a number")
    return len(pattern)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; which layers have windows is llama.cpp's own."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.optional("attention.sliding_window")
    return read_gguf_decoder(fields, tensors, factors) | {"sliding_window": window}


FAMILY = record(
    "exaone4",
    "Exaone4ForCausalLM",
    read_config,
    Layout(norms=POST_NORMS),
    gguf=GgufFormat(architecture="exaone4", read=read_gguf),
)
