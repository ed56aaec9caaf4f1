"""Mistral's families (transformers, modeling_mistral.py, _ministral3.py, _mixtral.py).

Mistral is Llama with a sliding window in all layers, and goes as Llama in GGUF, without a window,
as llama.cpp computes it. Ministral 3 has queries that grow, as the scaling of rotary positions
says; Mixtral has experts in the place of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    has_params_experts,
    read_decoder,
    read_expert_counts,
    read_window,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    has_gguf_experts,
    read_gguf_decoder,
    read_gguf_experts,
)
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Temperature
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families.expert_parts import MIXTRAL, MIXTRAL_EXPERTS, with_experts
from shardnet.model.families.family import ConsolidatedFormat, GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record

PARAMS_POSITIONS = 32768
"""Positions where params.json does not say."""


def _read_mistral(fields: Fields) -> ModelConfig:
    """Read a MistralConfig: one window for all layers, 4096 unless it says null."""
    config = read_decoder(fields, n_kv_heads=8, max_positions=131072, attention_bias=None)
    return replace(config, windows=(read_window(fields, 4096),) * config.n_layers)


def _read_params(fields: Fields) -> dict[str, Any]:
    """Read Mistral's params.json (github.com/mistralai/mistral-inference)."""
    positions = fields.positive("max_seq_len", PARAMS_POSITIONS)
    quantization: Mapping[str, Any] = fields.take("quantization", dict, {})
    if quantization:
        _check_quantization(fields.inner("quantization", quantization))
    return {
        "intermediate_size": fields.positive("hidden_dim"),
        "max_position_embeddings": fields.positive("max_position_embeddings", positions),
        "sliding_window": fields.optional("sliding_window"),
    }


def _check_quantization(fields: Fields) -> None:
    """Refuse weights that are stored in anything but FP8 with one scale for each."""
    fields.one_of("qformat_weight", ("fp8_e4m3",))
    fields.ignore("qscheme_act")  # activations are not quantised here
    fields.note_the_rest()


BETA = "llama_4_scaling_beta"


SCALING = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""What transformers takes where the config says nothing of rotary positions."""


IGNORED = (BETA, "max_position_embeddings")
"""What else stands there: how queries grow, and what the config says itself."""


def _read_ministral3(fields: Fields) -> ModelConfig:
    """Read a Ministral3Config."""
    rope = partial(read_rope, ignored=IGNORED, scaling=SCALING)
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=262144,
        norm_eps=1e-5,
        head_size=128,
        rope=rope,
        attention_bias=None,
    )
    return replace(
        config,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
        temperature=read_temperature(fields, config, SCALING),
    )


def read_temperature(
    fields: Fields, config: ModelConfig, scaling: Mapping[str, Any]
) -> Temperature | None:
    """Read how queries grow: not at all without the key or by 0. `scaling` is as in `read_rope`."""
    beta = rope_object(fields, scaling).nonzero(BETA)
    if beta is None or config.rope is None:
        return None
    return Temperature(scale=beta, floor=config.rope.original_max_positions)


def _read_ministral3_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    config = read_gguf_decoder(fields)
    scale, log = fields.nonzero("attention.temperature_scale"), "yarn_log_multiplier"
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if (multiplier := fields.nonzero(f"rope.scaling.{log}")) is not None:
        fields.require("rope.scaling.mscale", multiplier)
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return config | {"rope_scaling": scaling | {BETA: scale}}


_MIXTRAL_THETA = 1e6


def _read_mixtral(fields: Fields) -> ModelConfig:
    """Read a MixtralConfig: experts in every layer, a window in all or none."""
    rope = partial(read_rope, theta=_MIXTRAL_THETA)
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=rope, attention_bias=None
    )
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    windows = (fields.optional("sliding_window"),) * config.n_layers
    return with_experts(replace(config, windows=windows), n_experts, top_k)


def read_mixtral_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; each expert is as wide as the MLP that the model would have."""
    config = read_gguf_decoder(fields) | read_gguf_experts(fields)
    inner = config["intermediate_size"]
    width = fields.positive("expert_feed_forward_length", inner)
    if width != inner:
        raise fields.unsupported("expert_feed_forward_length", width, str(inner))
    return config


def _read_mixtral_params(fields: Fields) -> dict[str, Any]:
    """Read Mistral's params.json with an object `moe`."""
    moe: Mapping[str, Any] = fields.take("moe", dict)
    inner = fields.inner("moe", moe)
    config = {
        "num_local_experts": inner.positive("num_experts"),
        "num_experts_per_tok": inner.positive("num_experts_per_tok"),
        "rope_theta": fields.number("rope_theta", _MIXTRAL_THETA, within=THETAS),
    }
    inner.note_the_rest()
    return config | _read_params(fields)


FAMILIES: Final = (
    record(
        "mistral",
        "MistralForCausalLM",
        _read_mistral,
        consolidated=ConsolidatedFormat(
            claims=lambda fields: (
                not fields.given("multiple_of") and not has_params_experts(fields)
            ),
            read=_read_params,
        ),
    ),
    record(
        "ministral3",
        "Ministral3ForCausalLM",
        _read_ministral3,
        gguf=GgufFormat(
            architecture="mistral3", read=_read_ministral3_gguf, interleaved_rotary=True
        ),
    ),
    record(
        "mixtral",
        "MixtralForCausalLM",
        _read_mixtral,
        Layout(mlp=MIXTRAL_EXPERTS),
        experts=MIXTRAL,
        stacking=Stacking.CONCATENATED,
        gguf=GgufFormat(
            architecture="llama",
            claims=has_gguf_experts,
            read=read_mixtral_gguf,
            interleaved_rotary=True,
        ),
        consolidated=ConsolidatedFormat(
            claims=lambda fields: not fields.given("multiple_of") and has_params_experts(fields),
            read=_read_mixtral_params,
        ),
    ),
)
