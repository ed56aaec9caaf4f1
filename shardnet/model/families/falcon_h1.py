"""Falcon-H1 (transformers, modeling_falcon_h1.py): attention and Mamba-2 side by side.

Outputs of most linears are multiplied by numbers of the config, which GGUF files have in the
weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.limits import SCALES
from shardnet.model.config.model_config import DeltaNet, ModelConfig, OutputFactors
from shardnet.model.families import mamba2
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import ATTENTION, Part
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.model.layers.modules import BothMixers, GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

_NO_BIASES: Final = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def _read_config(fields: Fields) -> ModelConfig:
    """Read a FalconH1Config."""
    for key in _NO_BIASES:
        fields.require(key, False)
    fields.ignore("num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", "layer_types")
    fields.ignore("attn_layer_indices", "layers_block_type")
    config = read_decoder(
        fields, n_kv_heads=8, max_positions=8192, norm_eps=1e-5, attention_bias=None
    )
    return replace(
        config,
        delta_net=_read_mamba(fields, config),
        output_factors=_read_factors(fields),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_divisor=1 / fields.number("lm_head_multiplier", 1.0),
    )


def _read_mamba(fields: Fields, config: ModelConfig) -> DeltaNet:
    """Read the sizes of Mamba-2; without a width of its own it follows from the hidden size."""
    width = fields.positive("mamba_expand", 2) * config.hidden_size
    if not (fields.given("mamba_d_ssm") and fields.missing("mamba_d_ssm")):  # null: by the factor
        width = fields.positive("mamba_d_ssm", 1024)
    fields.ignore("mamba_d_ssm")
    fields.require("mamba_conv_bias", True)
    read = mamba2.read_mamba(fields, tuple(range(config.n_layers)), width)
    assert read is not None, "a model has layers"
    has_norm = fields.take("mamba_rms_norm", bool, False)
    if fields.take("mamba_norm_before_gate", bool, True) and has_norm:
        raise fields.unsupported("mamba_norm_before_gate", True, "false with mamba_rms_norm")
    return replace(read, has_norm=has_norm, is_beside_attention=True)


def _read_factors(fields: Fields) -> OutputFactors:
    inputs = fields.number("attention_in_multiplier", 1.0)
    mamba = fields.number("ssm_in_multiplier", 1.0)
    each = _numbers(fields, "ssm_multipliers", 5)
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    return OutputFactors(
        queries=inputs,
        keys=inputs * fields.number("key_multiplier", 1.0),
        values=inputs,
        attention=fields.number("attention_out_multiplier", 1.0),
        mamba_in=tuple(mamba * factor for factor in each),
        mamba_out=fields.number("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _numbers(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    if fields.missing(key):
        fields.ignore(key)
        return (1.0,) * count
    return fields.numbers(key, count, within=SCALES)


def _tensors(config: ModelConfig, layer: int) -> Table:
    """Name attention and Mamba-2."""
    mamba = mamba2.mixer_tensors(config, f"model.layers.{layer}.mamba")
    return ATTENTION.tensors(config, layer) | mamba


def _load_both(config: ModelConfig, weights: WeightSource, layer: int) -> BothMixers:
    from shardnet.model.kernels.linear import ScaledLinear
    from shardnet.model.layers.modules import BothMixers, SelfAttention
    from shardnet.model.mixers.gated_delta import MambaProjection

    own, factors, prefix = config.delta_net, config.output_factors, f"model.layers.{layer}.mamba"
    assert own is not None
    assert factors is not None
    mamba = mamba2.load_mixer(config, weights, prefix)
    widths = (*(own.value_width,) * 2, *(own.key_width,) * 2, own.n_value_heads)
    assert isinstance(mamba.project, MambaProjection)
    in_proj = ScaledLinear.of(mamba.project.in_proj, *zip(widths, factors.mamba_in, strict=True))
    plain = SelfAttention.load(config, weights, layer)
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    parts = ((queries, factors.queries), (keys, factors.keys), (keys, factors.values))
    return BothMixers(
        self_attn=replace(
            plain,
            qkv_proj=ScaledLinear.of(plain.qkv_proj, *parts),
            o_proj=ScaledLinear.of(plain.o_proj, (config.hidden_size, factors.attention)),
        ),
        recurrence=replace(
            mamba,
            project=replace(mamba.project, in_proj=in_proj),
            out_proj=ScaledLinear.of(mamba.out_proj, (config.hidden_size, factors.mamba_out)),
        ),
    )


def _load_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> GatedMlp:
    from shardnet.model.kernels.linear import ScaledLinear

    assert config.output_factors is not None
    plain: GatedMlp = mamba2.FEED_FORWARD.load(config, weights, layer)
    inner = plain.gate_up_proj.shape[0] // 2
    parts = ((inner, config.output_factors.gate), (inner, 1.0))
    down = (config.hidden_size, config.output_factors.down)
    return replace(
        plain,
        gate_up_proj=ScaledLinear.of(plain.gate_up_proj, *parts),
        down_proj=ScaledLinear.of(plain.down_proj, down),
    )


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata: all factors are in the weights."""
    mamba = mamba2.read_gguf_mamba(fields)
    return read_gguf_decoder(fields) | {
        "mamba_n_heads": mamba["heads"],
        "mamba_d_ssm": mamba["inner"],
        "mamba_n_groups": mamba["groups"],
        "mamba_d_state": mamba["state"],
        "mamba_d_conv": mamba["taps"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in fields.tensors,
        "mamba_norm_before_gate": False,
    }


FAMILY = record(
    "falcon_h1",
    "FalconH1ForCausalLM",
    _read_config,
    Layout(
        attention=Part(tensors=_tensors, load=_load_both),
        mlp=Part(tensors=mamba2.FEED_FORWARD.tensors, load=_load_mlp),
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        final_norm="model.final_layernorm",
    ),
    has_whole_heads=True,
    gguf=GgufFormat(
        architecture="falcon-h1",
        read=_read_gguf,
        decay=".A_log",
        block_names=tuple((f"mamba.{own}", stored) for own, stored in mamba2.OF_MAMBA),
    ),
)
