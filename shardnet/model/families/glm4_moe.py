"""GLM-4.5 (transformers, modeling_glm4_moe.py): heads half rotated, DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, deepseek_v3
from shardnet.model.families.family import Family, GgufFormat, MtpNames, Stacking, decoder_stage
from shardnet.model.families.llama import pre_norm_layer
from shardnet.model.families.tensor_shapes import Table, attention, head_norms, pre_norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Glm4MoeConfig."""
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        intermediate_size=10944,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        has_head_norms=fields.take("use_qk_norm", bool, False),
    )
    defaults = Experts(
        n_experts=128,
        top_k=8,
        intermediate_size=1408,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        layers=(1,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name attention, of which the output has no bias, and DeepSeek-V3's MLP or experts."""
    return (
        attention(config, layer, output_bias=False)
        | (head_norms(config, layer) if config.has_head_norms else {})
        | deepseek_v3.mlp_tensors(config, layer)
        | pre_norms(config, layer)
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention

    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=config.has_head_norms)
    mlp = deepseek_v3.load_mlp(config, weights, layer)
    return pre_norm_layer(config, weights, layer, self_attn, mlp)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata. What no key says, the tensors do."""
    fields.require("expert_gating_func", 2)  # sigmoid
    return (
        read_gguf_decoder(fields, tensors, factors, may_be_partial=True)
        | deepseek_v2.read_gguf_experts(fields)
        | {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        }
    )


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    mtp=MtpNames.LAYER,
    experts=deepseek_v2.EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="glm4moe",
        read=read_gguf,
        renamed=(("correction_bias", "correction.bias"),),
    ),
)
