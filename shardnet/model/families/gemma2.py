"""Gemma 2 and 3 (transformers, modeling_gemma2.py, _gemma3.py): norms around both sub-layers.

Gemma 2 has soft caps. Gemma 3 has norms over heads, and rotary positions of their own in layers
with a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_full_rope,
    read_sliding_rope,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record

_GLOBAL_THETA: Final = 1_000_000.0
_LOCAL_THETA: Final = 10_000.0
_LAYERS_27B: Final = 46
_GEMMA3_27B: Final = 62
"""Of the models whose scores are scaled by another size than its heads'; llama.cpp goes by the
number of layers too."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a Gemma2Config: every other layer has a window, beginning with the first."""
    fields.ignore("sliding_window_size")  # says again what sliding_window says
    config = read_gemma(fields, 8192, read_rope)
    return replace(
        config,
        windows=read_periodic_windows(fields, config.n_layers, period=2),
        attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma(
    fields: Fields, max_positions: int, rope: Callable[[Fields, int, int], Rope]
) -> ModelConfig:
    """Read what Gemma 2 and 3 say alike: head size of its own, norms that store what exceeds 1.

    `max_positions` and `rope` are those of `read_decoder`.
    """
    fields.ignore("hidden_act")  # an older name, which transformers does not look at either
    fields.require("use_bidirectional_attention", False)
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=max_positions,
        head_size=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        rope=rope,
    )
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=1.0,
        embedding_multiplier=config.hidden_size**0.5,
    )


def read_periodic_windows(fields: Fields, n_layers: int, period: int) -> tuple[int | None, ...]:
    """Read the windows, which all layers have but the last of each period."""
    window = fields.positive("sliding_window", 4096)
    return read_windows(fields, n_layers, window, lambda layer: (layer + 1) % period != 0)


def read_soft_cap(fields: Fields, key: str, default: float | None) -> float | None:
    """Read a soft cap: null is None, a missing key the default."""
    return fields.optional_number(key) if fields.given(key) else default


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; soft caps that it leaves out are the published ones."""
    return read_gguf_gemma(fields, _LAYERS_27B) | {
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping") or 30.0,
    }


def read_gguf_gemma(fields: GgufFields, layers_27b: int) -> dict[str, Any]:
    """Read what Gemma 2 and 3 say alike.

    The model with `layers_27b` layers scales scores by the hidden size divided by the heads, which
    no key says.
    """
    config = read_gguf_decoder(fields)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == layers_27b:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.positive("attention.sliding_window"),
    }


LAYOUT: Final = Layout(
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
)


def _read_gemma3(fields: Fields) -> ModelConfig:
    """Read a Gemma3TextConfig: five layers with a window, then one without, and so on.

    A soft cap of the scores is refused: transformers reads the key and computes without.
    """
    config = read_gemma(fields, 131072, partial(read_full_rope, theta=_GLOBAL_THETA))
    period = fields.positive("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")
    return replace(
        config,
        has_head_norms=True,
        windows=read_periodic_windows(fields, config.n_layers, period),
        local_rope=read_sliding_rope(
            fields, config, theta=fields.number("rope_local_base_freq", _LOCAL_THETA, within=THETAS)
        ),
        logit_soft_cap=read_soft_cap(fields, "final_logit_softcapping", None),
    )


def _read_gemma3_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_gemma(fields, _GEMMA3_27B) | {
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0, within=THETAS),
        "sliding_window_pattern": fields.positive("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


FAMILIES: Final = (
    record(
        "gemma2",
        "Gemma2ForCausalLM",
        read_config,
        LAYOUT,
        gguf=GgufFormat(architecture="gemma2", read=read_gguf),
    ),
    record(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _read_gemma3,
        LAYOUT,
        gguf=GgufFormat(architecture="gemma3", read=_read_gemma3_gguf),
    ),
)
