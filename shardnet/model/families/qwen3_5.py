"""Qwen 3.5 (transformers, modeling_qwen3_5.py, modeling_qwen3_5_moe.py): Qwen3-Next's parts.

The linears of a DeltaNet have their columns in another order, and stand apart in the files.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder, read_gguf_delta_net
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.families.expert_parts import STACKED, read_experts
from shardnet.model.families.family import MtpNames
from shardnet.model.families.layout import record
from shardnet.model.families.qwen3_next import (
    Shapes,
    gguf_format,
    hybrid_layout,
    read_gguf_hybrid,
    read_hybrid,
)

if TYPE_CHECKING:
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.gated_delta import Project


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5TextConfig."""
    return read_text_config(fields, n_kv_heads=4, intermediate_size=12288)


def read_text_config(
    fields: Fields, *, n_kv_heads: int, intermediate_size: int, **more: Any
) -> ModelConfig:
    """Read what the text models say alike. The numbers are defaults, `more` as in read_hybrid.

    States are float32 here whatever `mamba_ssm_dtype` says, as in transformers.
    """
    fields.ignore("mamba_ssm_dtype")
    return read_hybrid(fields, n_kv_heads=n_kv_heads, intermediate_size=intermediate_size, **more)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    config = read_gguf_decoder(fields, tensors, factors, may_be_partial=True)
    return config | read_gguf_delta_net(fields, takes_turns=True)


def _linears(config: ModelConfig, own: DeltaNet) -> Shapes:
    """Return the four linears that a DeltaNet has before the convolution."""
    hidden = config.hidden_size
    return {
        "in_proj_qkv": (own.mixed_width, hidden),
        "in_proj_z": (own.value_width, hidden),
        "in_proj_b": (own.n_value_heads, hidden),
        "in_proj_a": (own.n_value_heads, hidden),
    }


def _projections(own: DeltaNet, weights: WeightSource, prefix: str) -> Project:
    from shardnet.model.mixers.gated_delta import Projections

    return Projections(
        config=own,
        qkvz_proj=weights.linear(f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"),
        ba_proj=weights.linear(f"{prefix}.in_proj_b", f"{prefix}.in_proj_a", precise=True),
        groups_qkvz=False,
        groups_ba=False,
    )


LAYOUT: Final = hybrid_layout(_linears, _projections)


def _read_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5MoeTextConfig: every layer has experts, and weights that sum to 1."""
    config = read_text_config(fields, n_kv_heads=2, intermediate_size=5632)
    fields.require("norm_topk_prob", True)
    layers = tuple(range(config.n_layers))
    return read_experts(fields, config, layers, counts=(256, 8), inner=512, shared=512, sums=True)


def _read_moe_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_hybrid(fields, tensors, factors) | read_gguf_delta_net(
        fields, takes_turns=True
    )


FAMILIES: Final = (
    record(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        read_config,
        LAYOUT,
        mtp=MtpNames.PREFIX,
        gguf=gguf_format("qwen35", read_gguf),
        pretokenizer="qwen35",
    ),
    record(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _read_moe,
        LAYOUT,
        mtp=MtpNames.PREFIX,
        **STACKED,
        gguf=gguf_format("qwen35moe", _read_moe_gguf),
        pretokenizer="qwen35",
    ),
)
