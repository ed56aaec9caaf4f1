"""MiniMax-M2 (transformers, modeling_minimax_m2.py): OLMo-2's norms, heads half rotated, experts.

Experts are named as Mixtral's and chosen as DeepSeek-V3's, without groups and shared ones.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import Experts, ModelConfig, Rope
from shardnet.model.config.rope import read_rope
from shardnet.model.families import mixtral, olmo2
from shardnet.model.families.deepseek_v2 import require_text
from shardnet.model.families.family import Family, GgufFormat, Stacking, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import Table, attention, pre_norms, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource

BIAS = "block_sparse_moe.e_score_correction_bias"


def read_config(fields: Fields) -> ModelConfig:
    """Read a MiniMaxM2Config, with the published keys that transformers goes without."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=196608,
        head_size=128,
        intermediate_size=1536,
        rope=_read_rope,
    )
    require_text(fields, "qk_norm_type", "per_layer")
    require_text(fields, "scoring_func", "sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        fields.require(key, only=True)
    for part in ("full_attention", "linear_attention", "mlp"):
        fields.require(f"layernorm_{part}_beta", 1.0)
    fields.require("shared_intermediate_size", 0)
    fields.ignore("mlp_intermediate_size", "shared_moe_mode")  # of parts that it has none of
    fields.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    kinds = fields.take("attn_type_list", list, [])
    if any(kind != 1 for kind in kinds):
        raise fields.unsupported("attn_type_list", kinds, "[1, 1, …]")
    n_experts, top_k = read_expert_counts(fields, ("num_local_experts", "num_experts"), 256, 8)
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=config.intermediate_size,
        normalize_top_k=True,
        layers=tuple(range(config.n_layers)),
    )
    return replace(
        config, windows=(fields.optional("sliding_window"),) * config.n_layers, experts=experts
    )


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    rotated = fields.positive("rotary_dim", head_size)
    read = partial(read_rope, may_be_partial=True, theta=5000000.0, share=rotated / head_size)
    return read(fields, max_positions, head_size)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Mixtral's parameters, norms over all queries and all keys, and the router's bias."""
    assert config.experts is not None
    return (
        attention(config, layer)
        | olmo2.whole_norms(config, layer)
        | sparse_mlp(config, layer, mixtral.EXPERTS)
        | {f"model.layers.{layer}.{BIAS}": (config.experts.n_experts,)}
        | pre_norms(config, layer)
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.group_routers import BestTwoRouter

    assert config.experts is not None
    prefix = f"model.layers.{layer}"
    router = BestTwoRouter(
        experts=config.experts,
        gate=weights.linear(f"{prefix}.{mixtral.EXPERTS.block}.gate", wide=True),
        bias=weights.parameter(f"{prefix}.{BIAS}"),
    )
    sparse = SparseMlp(router=router, experts=mixtral.load_experts(config, weights, layer))
    self_attn = olmo2.whole_norm_attention(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, sparse)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return read_gguf_decoder(fields, tensors, factors) | {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "intermediate_size": fields.positive("expert_feed_forward_length"),
    }


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    experts=mixtral.EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="minimax-m2",
        read=read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
    has_whole_heads=True,
)
