"""StarCoder2 (transformers, modeling_starcoder2.py): LayerNorms, an MLP without a gate, biases."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, gguf_biases, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import llama
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import (
    Table,
    attention,
    decoder_head,
    plain_mlp,
    pre_norms,
)

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read a Starcoder2Config, with the published keys that transformers goes without."""
    fields.ignore("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.require(key, only=True)
    fields.require("scale_attn_weights", only=True)
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=4096,
        norm_eps=1e-5,
        norm_key="norm_epsilon",
        intermediate_size=12288,
        activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    has_bias = fields.take("use_bias", bool, True)
    return replace(
        config,
        attention_bias=has_bias,
        mlp_bias=has_bias,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, GPT-2's MLP, and LayerNorms before both."""
    mlp = plain_mlp(config, layer, "c_fc", "c_proj")
    return attention(config, layer) | mlp | with_biases(pre_norms(config, layer))


def head_tensors(config: ModelConfig) -> Table:
    """Name the final norm and the LM head."""
    norm = with_biases({"model.norm.weight": (config.hidden_size,)})
    return decoder_head(config) | norm


def with_biases(norms: Table) -> Table:
    """Name the biases of `norms` too."""
    return norms | {name.removesuffix("weight") + "bias": norms[name] for name in norms}


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import PlainMlp, SelfAttention

    mlp = f"model.layers.{layer}.mlp"
    return llama.pre_norm_layer(
        config,
        weights,
        layer,
        SelfAttention.load(config, weights, layer),
        PlainMlp.load(config, weights, f"{mlp}.c_fc", f"{mlp}.c_proj"),
    )


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; windows are left out, as llama.cpp does."""
    norm = ("attention.layer_norm_epsilon", "norm_epsilon")
    bias = {"use_bias": gguf_biases(tensors)["attention_bias"]}
    return read_gguf_decoder(fields, tensors, factors, norm=norm) | bias


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    head_tensors=head_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="starcoder2", read=read_gguf),
)
