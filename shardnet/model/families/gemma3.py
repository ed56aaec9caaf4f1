"""Gemma 3's text models (transformers, modeling_gemma3.py): Gemma 2 with norms over heads.

Layers with a window have rotary positions of their own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import FULL, SLIDING
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_scaling, rope_object
from shardnet.model.families import gemma2
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, head_norms

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
_LAYERS_27B: Final = 62
"""See Gemma 2's."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a Gemma3TextConfig: five layers with a window, then one without, and so on.

    A soft cap of the scores is refused: transformers reads the key and computes without.
    """
    config = gemma2.read_gemma(fields, 131072, _read_global_rope)
    period = fields.positive("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")
    return replace(
        config,
        windows=gemma2.read_periodic_windows(fields, config.n_layers, period),
        local_rope=_read_local_rope(fields, config),
        logit_soft_cap=gemma2.read_soft_cap(fields, "final_logit_softcapping", None),
    )


def _read_global_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions of layers without a window, the only ones that version 4 scales."""
    theta = fields.number("rope_theta", GLOBAL_THETA, within=THETAS)
    inner = _rope_of_layers(fields, FULL) or rope_object(fields)
    plain = Rope(theta=inner.number("rope_theta", theta, within=THETAS))
    return read_scaling(inner, plain, max_positions=max_positions, head_size=head_size)


def _read_local_rope(fields: Fields, config: ModelConfig) -> Rope:
    theta = fields.number("rope_local_base_freq", LOCAL_THETA, within=THETAS)
    inner = _rope_of_layers(fields, SLIDING)
    if inner is None:
        return Rope(theta=theta)
    plain = Rope(theta=inner.number("rope_theta", theta, within=THETAS))
    positions = config.max_positions
    return read_scaling(inner, plain, max_positions=positions, head_size=config.head_size)


def _rope_of_layers(fields: Fields, kind: str) -> Fields | None:
    """Find one layer kind's object in the `rope_parameters` that transformers 5 nests."""
    if fields.missing("rope_parameters"):
        return None
    outer = fields.inner("rope_parameters", fields.take("rope_parameters", dict))
    outer.ignore(FULL, SLIDING)
    outer.note_the_rest()
    return outer.inner(kind, outer.take(kind, dict, {}))


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Gemma 2's parameters and the norms over heads."""
    return gemma2.layer_tensors(config, layer) | head_norms(config, layer)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return gemma2.read_gguf_gemma(fields, tensors, factors, _LAYERS_27B) | {
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0, within=THETAS),
        "sliding_window_pattern": fields.positive("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(partial(gemma2.load_layer, with_head_norm=True)),
    gguf=GgufFormat(architecture="gemma3", read=read_gguf),
)
