"""Hunyuan 4 (transformers, modeling_hy_v4.py): GLM-5's chosen positions, several streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, Latent, ModelConfig, StreamKind, Streams
from shardnet.model.families import deepseek_v2, deepseek_v3
from shardnet.model.families.deepseek_v32 import choosing_layers, read_indexer
from shardnet.model.families.family import Family, Stacking, decoder_stage
from shardnet.model.families.tensor_shapes import Table, decoder_head, linears, pre_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource

_LATENT: Final = Latent(
    rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=1536, interleaved=False
)
_EXPERTS: Final = Experts(
    n_experts=256,
    top_k=8,
    intermediate_size=768,
    normalize_top_k=True,
    shared_intermediate_size=1,
    output_scale=2.827,
    layers=(1,),
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read a HYV4Config."""
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=False,
        max_positions=262144,
        norm_eps=1e-5,
        defaults=_LATENT,
        has_kv_heads=False,
    )
    fields.ignore("layer_types", "learnable_sink_init", "num_nextn_predict_layers")
    normalizes = fields.take("norm_topk_prob", bool, True)
    experts = replace(_EXPERTS, normalize_top_k=normalizes)
    config = deepseek_v2.read_experts(fields, config, experts, smallest_group=2)
    layers = choosing_layers(fields, config.n_layers, (4, 2))
    indexer = replace(read_indexer(fields, layers, 16), rotates_last=True, norm_eps=config.norm_eps)
    limit = fields.number("swiglu_limit", 10.0)
    if config.experts is not None and limit > 0:
        config = replace(config, experts=replace(config.experts, swiglu_limit=limit))
    return replace(config, has_sinks=True, indexer=indexer, streams=_read_streams(fields))


def _read_streams(fields: Fields) -> Streams:
    return Streams(
        count=fields.positive("hc_mult", 4),
        kind=StreamKind.APART,
        eps=fields.number("hc_eps", 1e-6),
        magnitude=fields.number("hc_magnitude", 2.0),
    )


def stream_tensors(config: ModelConfig, name: str, n_kinds: int, begin: str = "") -> Table:
    """Name the parameters of a mixer of streams that makes so many kinds of factors."""
    assert config.streams is not None
    count = config.streams.count
    n_out = (count, 2 * count, (2 + count) * count)[n_kinds - 1]
    own = f"{name}.{begin}"
    return {
        f"{own}fn": (n_out, config.row_width),
        f"{own}base": (n_out,),
        f"{own}scale": (n_kinds,),
    }


def _layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name latent attention with its gates and sinks, the MLP, norms and mixers."""
    assert config.latent is not None
    prefix = f"model.layers.{layer}"
    gates = {"gate_proj": (config.n_heads * config.latent.value_size, config.hidden_size)}
    made = deepseek_v2.latent_attention(config, layer) | linears(f"{prefix}.self_attn", gates)
    made[f"{prefix}.self_attn.sinks"] = (config.n_heads,)
    for mixer in ("attn_hc", "ffn_hc"):
        made |= stream_tensors(config, f"{prefix}.{mixer}", 2)
    return made | deepseek_v3.mlp_tensors(config, layer) | pre_norms(config, layer)


def _head_tensors(config: ModelConfig) -> Table:
    return decoder_head(config) | stream_tensors(config, "model.hc_head", 1, "hc_")


def _load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.decoder_layer import stream_layer
    from shardnet.model.layers.latent_attention import LatentAttention
    from shardnet.model.shards.cut import Axis

    attn = f"model.layers.{layer}.self_attn"
    plain = LatentAttention.load(config, weights, layer)
    sinks = weights.parameter(f"{attn}.sinks", rows=Axis.HEADS).view(1, -1, 1)
    mixer = replace(
        plain,
        kind=replace(plain.kind, sinks=sinks),
        gate_proj=weights.linear(f"{attn}.gate_proj", outputs=(Axis.HEADS,)),
    )
    mlp = deepseek_v3.load_mlp(config, weights, layer)
    return stream_layer(config, weights, layer, mixer, mlp)


FAMILY = Family(
    model_type="hy_v4",
    architecture="HYV4ForCausalLM",
    read_config=_read_config,
    layer_tensors=_layer_tensors,
    head_tensors=_head_tensors,
    load_stage=decoder_stage(_load_layer),
    renamed_tensors=(
        (".hc_pre.hc_attn_layer.hc_", ".attn_hc."),
        (".hc_pre.hc_mlp_layer.hc_", ".ffn_hc."),
        (".hc_pre.hc_head.hc_head_", ".hc_head.hc_"),
        (".learnable_sink_param", ".sinks"),
        (".linear_gate.", ".gate_proj."),
    ),
    ignored_tensors=r"model\.mtp_layers\..*",
    experts=deepseek_v2.EXPERTS,
    stacking=Stacking.CONCATENATED,
)
