"""SmolLM3 (transformers, modeling_smollm3.py): Llama without positions in every fourth layer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from shardnet.model.config.decoder_config import read_decoder, read_nope_layers, read_windows
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import llama
from shardnet.model.families.family import Family, GgufFormat


def read_config(fields: Fields) -> ModelConfig:
    """Read a SmolLM3Config: windows are switched off as a rule."""
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=32768,
        is_tied=True,
        rope=partial(read_rope, theta=2000000.0),
    )
    nope = read_nope_layers(fields, config.n_layers)
    is_used = fields.take("use_sliding_window", bool, False)
    window = fields.optional("sliding_window") if is_used else None
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        nope_layers=nope,
        windows=read_windows(
            fields, config.n_layers, window, lambda n: window is not None and n in nope
        ),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; which layers have no positions is llama.cpp's own."""
    return read_gguf_decoder(fields, tensors, factors) | gguf_biases(tensors)


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read_config=read_config,
    layer_tensors=llama.layer_tensors,
    load_stage=llama.FAMILY.load_stage,
    gguf=GgufFormat(architecture="smollm3", read=read_gguf, interleaved_rotary=True),
)
