"""DeepSeek-V3 (transformers, modeling_deepseek_v3.py): V2, experts chosen by sigmoid and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families import deepseek_v2
from shardnet.model.families.family import Family, GgufFormat, MtpNames, Stacking, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import Table, pre_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import Router, SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV3Config."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=fields.take("rope_interleave", bool, True), max_positions=4096
    )
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    defaults = Experts(
        n_experts=256,
        top_k=8,
        intermediate_size=2048,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        n_groups=8,
        top_groups=4,
        output_scale=2.5,
        layers=(3,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name V2's attention and norms, and the MLP."""
    attention = deepseek_v2.latent_attention(config, layer)
    return attention | pre_norms(config, layer) | mlp_tensors(config, layer)


def mlp_tensors(config: ModelConfig, layer: int) -> Table:
    """Name V2's MLP and experts, and the bias that experts are chosen with."""
    tensors, experts = deepseek_v2.mlp_tensors(config, layer), config.layer_experts(layer)
    if experts is not None:
        bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        tensors[bias] = (experts.n_experts,)
    return tensors


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.latent_attention import LatentAttention

    self_attn = LatentAttention.load(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, load_mlp(config, weights, layer))


def load_mlp(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    kind: Callable[..., Router] | None = None,
) -> GatedMlp | SparseMlp:
    """Take the parameters of the MLP or the experts of the absolute `layer`.

    Their router is a BestTwoRouter, or of another `kind` that takes experts, gate and bias.
    """
    from shardnet.model.layers.group_routers import BestTwoRouter

    def router(experts: Experts, gate: str) -> Router:
        return (kind or BestTwoRouter)(
            experts=experts,
            gate=weights.linear(gate, wide=True),
            bias=weights.parameter(f"{gate}.e_score_correction_bias"),
        )

    return deepseek_v2.load_mlp(config, weights, layer, router)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    mtp=MtpNames.LAYER,
    experts=deepseek_v2.EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="deepseek2",
        claims=deepseek_v2.has_sigmoid,
        read=deepseek_v2.read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
)
