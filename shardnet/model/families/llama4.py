"""Llama 4's text models (transformers, modeling_llama4.py): rotary positions in most layers only.

These attend within chunks of positions, the others to all of them.

Experts in some or all layers, one of which (shared) takes every token. A token's score multiplies
what goes into its experts, not what comes out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.errors import shown
from shardnet.model.config.decoder_config import (
    FULL,
    read_decoder,
    read_expert_counts,
    read_layer_kinds,
    read_nope_layers,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.model_config import Experts, ModelConfig, Temperature
from shardnet.model.config.rope import read_rope
from shardnet.model.families.expert_parts import load_experts
from shardnet.model.families.family import GgufFormat, Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, attention, gated

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.mixed_attention import MixedAttention

THETA = 500000.0
CHUNKED = "chunked_attention"
EXPERTS = ExpertNames(block="feed_forward", gate="gate_up_proj", up="gate_up_proj")
_MOST_EXPERTS_WITH_NORM = 16
"""Of the published models, the one with more experts has no norms over heads, which no key of
llama.cpp's says."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a Llama4TextConfig."""
    fields.ignore("for_llm_compressor")  # of another program
    rope = partial(read_rope, theta=THETA)
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, head_size=128, rope=rope
    )
    nope = read_nope_layers(fields, config.n_layers)
    tunes = fields.take("attn_temperature_tuning", (bool, int), True)
    temperature = fields.number("attn_scale", 0.1)
    floor = fields.positive("floor_scale", 8192)
    return replace(
        config,
        nope_layers=nope,
        temperature=Temperature(scale=temperature, floor=floor, shift=1) if tunes else None,
        has_unit_heads=fields.take("use_qk_norm", bool, True),
        windows=_read_chunks(fields, config.n_layers, nope),
        has_chunks=True,
        experts=_read_experts(fields, config),
        intermediate_size=fields.positive("intermediate_size_mlp", 16384),
    )


def _read_chunks(fields: Fields, n_layers: int, nope: tuple[int, ...]) -> tuple[int | None, ...]:
    """Read the positions of a chunk for each layer, by default those that turn heads."""
    key = "attention_chunk_size"
    chunk = fields.optional(key) if fields.given(key) else 8192
    kinds = read_layer_kinds(fields, n_layers, FULL, CHUNKED)
    if kinds is None:
        kinds = [FULL if layer in nope else CHUNKED for layer in range(n_layers)]
    return tuple(chunk if kind == CHUNKED else None for kind in kinds)


def _read_experts(fields: Fields, config: ModelConfig) -> Experts | None:
    layers = fields.take("moe_layers", list, None)
    if layers == [] or (layers is None and fields.take("num_local_experts", int, 16) == 0):
        fields.ignore("num_local_experts", "num_experts", "num_experts_per_tok")
        fields.ignore("interleave_moe_layer_step")
        return None
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 16, 1)
    step = fields.positive("interleave_moe_layer_step", 1)
    if layers is None:
        layers = list(range(step - 1, config.n_layers, step))
    most = config.n_layers
    if len(layers) > most or not all(type(n) is int and 0 <= n < most for n in layers):
        raise fields.damaged(f"moe_layers is {shown(layers)}, expected some of {most} layers")
    if not layers:
        return None
    return Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=config.intermediate_size,
        normalize_top_k=False,
        shared_intermediate_size=config.intermediate_size,
        layers=tuple(sorted(set(layers))),
    )


def _mlp_tensors(config: ModelConfig, layer: int) -> Table:
    """Name an MLP or a router, experts and the shared one."""
    block, experts = f"model.layers.{layer}.{EXPERTS.block}", config.layer_experts(layer)
    if experts is None:
        return gated(config, block, config.intermediate_size)
    hidden, inner = config.hidden_size, experts.intermediate_size
    tensors: Table = {f"{block}.router.weight": (experts.n_experts, hidden)}
    for number in range(experts.n_experts):
        tensors |= gated(config, f"{block}.experts.{number}", inner, names=EXPERTS.linears)
    return tensors | gated(config, f"{block}.shared_expert", experts.shared_intermediate_size)


def _load_attention(config: ModelConfig, weights: WeightSource, layer: int) -> MixedAttention:
    from shardnet.model.mixers.mixed_attention import MixedAttention

    return MixedAttention(config, weights, layer)


def _load_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> GatedMlp | SparseMlp:
    from shardnet.model.layers.experts import SigmoidRouter, SparseMlp
    from shardnet.model.layers.modules import GatedMlp

    block, experts = f"model.layers.{layer}.{EXPERTS.block}", config.layer_experts(layer)
    if experts is None:
        return GatedMlp.load(config, weights, block)
    gate = weights.linear(f"{block}.router", precise=True)
    return SparseMlp(
        router=SigmoidRouter(gate=gate, top_k=experts.top_k),
        experts=load_experts(config, weights, f"{block}.experts", experts.n_experts, EXPERTS),
        shared=GatedMlp.load(config, weights, f"{block}.shared_expert"),
        weighs_inputs=True,
    )


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. What no key says is llama.cpp's own, which is the published models'."""
    config = read_gguf_decoder(fields)
    n_experts = fields.take("expert_count", int, 0)
    fields.require("attention.head_dim", config["head_dim"])
    config |= {
        "num_local_experts": n_experts,
        "intermediate_size_mlp": config["intermediate_size"],
        "use_qk_norm": fields.take("use_qk_norm", bool, n_experts <= _MOST_EXPERTS_WITH_NORM),
        **_read_gguf_chunk(fields, config["num_hidden_layers"]),
    }
    if n_experts == 0:
        fields.ignore("expert_used_count", "expert_feed_forward_length", "expert_gating_func")
        fields.ignore("interleave_moe_layer_step")
        return config
    fields.require("expert_gating_func", 2)  # sigmoid
    return config | {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "interleave_moe_layer_step": fields.positive("interleave_moe_layer_step"),
        "intermediate_size": fields.positive("expert_feed_forward_length"),
    }


def _read_gguf_chunk(fields: Fields, n_layers: int) -> dict[str, Any]:
    """Read the positions of a chunk. By 0 no layer attends in chunks, and all have positions."""
    key = "attention.sliding_window"
    if fields.take(key, int, 8192) == 0:
        return {"attention_chunk_size": None, "no_rope_layers": [1] * n_layers}
    return {"attention_chunk_size": fields.positive(key, 8192)}


FAMILY = record(
    "llama4_text",
    "Llama4ForCausalLM",
    read_config,
    Layout(
        attention=Part(tensors=attention, load=_load_attention),
        mlp=Part(tensors=_mlp_tensors, load=_load_mlp),
    ),
    experts=EXPERTS,
    stacking=Stacking.TRANSPOSED,
    gguf=GgufFormat(architecture="llama4", read=read_gguf),
)
