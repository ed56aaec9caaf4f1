"""Qwen3-Next and Qwen 3.5 (transformers, modeling_qwen3_next.py, _qwen3_5.py, _qwen3_5_moe.py).

Most layers have a gated DeltaNet, every fourth has attention with gates. In Qwen 3.5 the linears of
a DeltaNet have their columns in another order, and stand apart in the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    read_decoder,
    read_delta_net,
    read_sparse_layers,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    read_gguf_decoder,
    read_gguf_delta_net,
    read_gguf_experts,
)
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import kimi_linear
from shardnet.model.families.expert_parts import GATED_EXPERTS, STACKED, read_experts
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table, attention, head_norms, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.gated_delta import Project

    LoadLinears = Callable[[DeltaNet, WeightSource, str], Project]
    """Takes the linears of a DeltaNet below a prefix."""

_SHARE = 0.25
_NAMES: Final = ("conv1d", "norm", "out_proj")


_Shapes = dict[str, tuple[int, int]]


def _read_next(fields: Fields) -> ModelConfig:
    """Read a Qwen3NextConfig."""
    config = _read_hybrid(fields, n_kv_heads=2, intermediate_size=5632)
    layers = read_sparse_layers(fields, config.n_layers)
    return read_experts(fields, config, layers, counts=(512, 10), inner=512, shared=512, sums=True)


def _read_hybrid(
    fields: Fields,
    *,
    n_kv_heads: int,
    intermediate_size: int,
    attention: str = FULL,
    share: float = _SHARE,
) -> ModelConfig:
    """Read what Qwen3-Next and Qwen 3.5 say alike: norms store what exceeds 1.

    `n_kv_heads`, `intermediate_size` and the rotated `share` of a head are defaults. Layers
    with `attention` may be called so too.
    """
    fields.require("attn_output_gate", True)
    config = read_decoder(
        fields,
        n_kv_heads=n_kv_heads,
        max_positions=32768,
        head_size=256,
        intermediate_size=intermediate_size,
        rope=partial(read_rope, may_be_partial=True, share=share),
    )
    return replace(
        config,
        norm_offset=1.0,
        has_gates=True,
        delta_net=read_delta_net(fields, config.n_layers, attention=attention),
    )


def _joined_linears(config: ModelConfig, own: DeltaNet) -> _Shapes:
    """Return the linears of a DeltaNet: queries, keys, values and gate are one.

    In GGUF they are two, without groups.
    """
    both = {"in_proj_ba": (2 * own.n_value_heads, config.hidden_size)}
    if own.has_split_gate:
        gate = {"in_proj_z": (own.value_width, config.hidden_size)}
        return {"in_proj_qkv": (own.mixed_width, config.hidden_size)} | gate | both
    return {"in_proj_qkvz": (own.mixed_width + own.value_width, config.hidden_size)} | both


def _hybrid_layout(
    shapes: Callable[[ModelConfig, DeltaNet], _Shapes], project: LoadLinears
) -> Layout:
    """Make the layout of layers with a DeltaNet or gated attention, and an MLP or experts.

    `shapes` are those of a DeltaNet's linears, which `project` takes.
    """

    def tensors(config: ModelConfig, layer: int) -> Table:
        own = config.delta_net
        if own is None or layer not in own.layers:
            return _gated_attention(config, layer)
        prefix = f"model.layers.{layer}.linear_attn"
        return linears(prefix, shapes(config, own)) | {
            f"{prefix}.conv1d.weight": (own.mixed_width, 1, own.n_taps),
            f"{prefix}.A_log": (own.n_value_heads,),
            f"{prefix}.dt_bias": (own.n_value_heads,),
            f"{prefix}.norm.weight": (own.value_size,),
            f"{prefix}.out_proj.weight": (config.hidden_size, own.value_width),
        }

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
        from shardnet.model.mixers.mixed_attention import GatedAttention

        own, prefix = config.delta_net, f"model.layers.{layer}.linear_attn"
        if own is None or layer not in own.layers:
            return GatedAttention.load(config, weights, layer)
        made = project(own, weights, prefix)
        return kimi_linear.load_delta_net(
            config, weights, prefix, made, _NAMES, gates_alone=own.gates_alone
        )

    return Layout(attention=Part(tensors=tensors, load=load), mlp=GATED_EXPERTS)


def _gated_attention(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention with norms over heads, whose queries have their gates beside them."""
    attn = f"model.layers.{layer}.self_attn.q_proj"
    tensors = attention(config, layer) | head_norms(config, layer)
    doubled = {
        name: (2 * shape[0], *shape[1:])
        for name, shape in tensors.items()
        if name.startswith(f"{attn}.")
    }
    return tensors | doubled


def _joined_projections(own: DeltaNet, weights: WeightSource, prefix: str) -> Project:
    from shardnet.model.mixers.gated_delta import Projections

    names = ("in_proj_qkv", "in_proj_z") if own.has_split_gate else ("in_proj_qkvz",)
    return Projections(
        config=own,
        qkvz_proj=weights.linear(*(f"{prefix}.{name}" for name in names)),
        ba_proj=weights.linear(f"{prefix}.in_proj_ba", precise=True),
        groups_qkvz=not own.has_split_gate,
        groups_ba=True,
    )


def _read_next_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_hybrid(fields) | read_gguf_delta_net(fields)


def read_gguf_hybrid(fields: GgufFields) -> dict[str, Any]:
    """Read what models with experts say, which need not be the width of an MLP no layer has."""
    inner = fields.positive("expert_feed_forward_length")
    fields.require("expert_weights_norm", True)
    shared = fields.positive("expert_shared_feed_forward_length")
    config = read_gguf_decoder(fields, intermediate_size=inner, may_be_partial=True)
    sizes = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": shared}
    return config | read_gguf_experts(fields) | sizes


def gguf_format(architecture: str, read: Callable[[GgufFields], dict[str, Any]]) -> GgufFormat:
    """Say how the converter writes these models, whose metadata `read` reads."""
    return GgufFormat(
        architecture=architecture,
        read=read,
        plain_norm=".linear_attn.norm.weight",
        decay=".A_log",
        renamed=((".dt_bias", ".dt_proj.bias"),),
    )


def _read_dense(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5TextConfig."""
    return read_text_config(fields, n_kv_heads=4, intermediate_size=12288)


def read_text_config(
    fields: Fields, *, n_kv_heads: int, intermediate_size: int, **more: Any
) -> ModelConfig:
    """Read what the text models say alike. The numbers are defaults, `more` as in _read_hybrid.

    States are float32 here whatever `mamba_ssm_dtype` says, as in transformers.
    """
    fields.ignore("mamba_ssm_dtype")
    return _read_hybrid(fields, n_kv_heads=n_kv_heads, intermediate_size=intermediate_size, **more)


def _read_dense_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    config = read_gguf_decoder(fields, may_be_partial=True)
    return config | read_gguf_delta_net(fields, takes_turns=True)


def _apart_linears(config: ModelConfig, own: DeltaNet) -> _Shapes:
    """Return the four linears that a DeltaNet has before the convolution."""
    hidden = config.hidden_size
    return {
        "in_proj_qkv": (own.mixed_width, hidden),
        "in_proj_z": (own.value_width, hidden),
        "in_proj_b": (own.n_value_heads, hidden),
        "in_proj_a": (own.n_value_heads, hidden),
    }


def _apart_projections(own: DeltaNet, weights: WeightSource, prefix: str) -> Project:
    from shardnet.model.mixers.gated_delta import Projections

    return Projections(
        config=own,
        qkvz_proj=weights.linear(f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"),
        ba_proj=weights.linear(f"{prefix}.in_proj_b", f"{prefix}.in_proj_a", precise=True),
    )


LAYOUT: Final = _hybrid_layout(_apart_linears, _apart_projections)


def _read_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen3_5MoeTextConfig: every layer has experts, and weights that sum to 1."""
    config = read_text_config(fields, n_kv_heads=2, intermediate_size=5632)
    fields.require("norm_topk_prob", True)
    layers = tuple(range(config.n_layers))
    return read_experts(fields, config, layers, counts=(256, 8), inner=512, shared=512, sums=True)


def _read_moe_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    return read_gguf_hybrid(fields) | read_gguf_delta_net(fields, takes_turns=True)


FAMILIES: Final = (
    record(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _read_next,
        _hybrid_layout(_joined_linears, _joined_projections),
        mtp=MtpNames.PREFIX,
        **STACKED,
        gguf=gguf_format("qwen3next", _read_next_gguf),
        pretokenizer="qwen2",
    ),
    record(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _read_dense,
        LAYOUT,
        mtp=MtpNames.PREFIX,
        gguf=gguf_format("qwen35", _read_dense_gguf),
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
