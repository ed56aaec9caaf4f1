"""Gemma 3's text models (transformers, modeling_gemma3.py): Gemma 2 with norms over heads.

Layers with a window have rotary positions of their own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import read_full_rope, read_sliding_rope
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import gemma2
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import record

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
_LAYERS_27B: Final = 62
"""See Gemma 2's."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a Gemma3TextConfig: five layers with a window, then one without, and so on.

    A soft cap of the scores is refused: transformers reads the key and computes without.
    """
    config = gemma2.read_gemma(fields, 131072, partial(read_full_rope, theta=GLOBAL_THETA))
    period = fields.positive("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")
    return replace(
        config,
        has_head_norms=True,
        windows=gemma2.read_periodic_windows(fields, config.n_layers, period),
        local_rope=read_sliding_rope(
            fields, config, theta=fields.number("rope_local_base_freq", LOCAL_THETA, within=THETAS)
        ),
        logit_soft_cap=gemma2.read_soft_cap(fields, "final_logit_softcapping", None),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return gemma2.read_gguf_gemma(fields, tensors, factors, _LAYERS_27B) | {
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0, within=THETAS),
        "sliding_window_pattern": fields.positive("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


FAMILY = record(
    "gemma3_text",
    "Gemma3ForCausalLM",
    read_config,
    gemma2.LAYOUT,
    gguf=GgufFormat(architecture="gemma3", read=read_gguf),
)
