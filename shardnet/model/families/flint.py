"""Families of small experts (transformers, modeling_flint.py, modeling_kolibri1.py).

Both have norms over heads, windows in most layers, positions in those alone, and a shared expert;
Flint has attention sinks, Kolibri four norms a layer and experts in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_sparse_layers,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.expert_parts import (
    KOLIBRI_EXPERTS,
    STACKED,
    UNBIASED_EXPERTS,
    read_experts,
)
from shardnet.model.families.layout import Layout, record


def _read_flint(fields: Fields) -> ModelConfig:
    """Read a FlintConfig."""
    config = read_decoder(
        fields, n_kv_heads=4, max_positions=262144, head_size=128, intermediate_size=6144
    )
    last = config.n_layers - 1
    config = _read_layers(fields, config, lambda n: n >= 2 and n % 4 != 1 and n != last)
    first = 2 if fields.missing("mlp_only_layers") else 0
    layers = [n for n in read_sparse_layers(fields, config.n_layers) if n >= first]
    config = read_experts(
        fields, config, tuple(layers), counts=(256, 6), inner=512, shared=1024, sums=True
    )
    bias = fields.take("attention_bias", bool, False)
    return replace(config, attention_bias=bias, has_sinks=True)


def _read_kolibri(fields: Fields) -> ModelConfig:
    """Read a Kolibri1Config."""
    inner = fields.optional("moe_intermediate_size") or 512
    config = read_decoder(
        fields, n_kv_heads=4, max_positions=262144, head_size=128, intermediate_size=inner
    )
    config = _read_layers(fields, config, lambda n: (n + 1) % 5 != 0)
    layers = tuple(range(config.n_layers))
    return read_experts(fields, config, layers, counts=(384, 6), inner=512, shared=512)


def _read_layers(
    fields: Fields, config: ModelConfig, is_local: Callable[[int], bool]
) -> ModelConfig:
    """Add which layers have windows, by default those that are `is_local`: only they turn heads."""
    window = fields.positive("sliding_window", 513)
    windows = read_windows(fields, config.n_layers, window, is_local)
    nope = tuple(n for n in range(config.n_layers) if windows[n] is None)
    return replace(config, windows=windows, nope_layers=nope, has_head_norms=True)


FAMILIES: Final = (
    record(
        "flint",
        "FlintForCausalLM",
        _read_flint,
        Layout(mlp=UNBIASED_EXPERTS),
        renamed_tensors=(
            (".self_attn.softmax_offset", ".self_attn.sinks"),
            (".mlp.shared_expert.", ".mlp.shared_experts."),
        ),
        **STACKED,
    ),
    record(
        "kolibri1",
        "Kolibri1ForCausalLM",
        _read_kolibri,
        Layout(
            mlp=KOLIBRI_EXPERTS,
            norms=(
                *("input_layernorm", "post_attn_norm"),
                *("post_attention_layernorm", "post_ffn_norm"),
            ),
        ),
        renamed_tensors=((".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),),
        **STACKED,
    ),
)
