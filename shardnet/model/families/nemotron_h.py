"""Nemotron-H and Nemotron 3 Nano (transformers, modeling_nemotron_h.py).

Each layer is one of four, with a norm before it: Mamba-2, attention, an MLP or experts without
gates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import FULL, LINEAR, read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_kv_heads
from shardnet.model.config.limits import MAX_LAYERS, NORM_EPS
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.families import deepseek_v2
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.mamba2 import (
    MOST_TAPS,
    OF_MAMBA,
    has_mamba,
    layers_of,
    load_mixer,
    mixer_tensors,
    read_gguf_mamba,
    read_sizes,
)
from shardnet.model.families.parts import ATTENTION
from shardnet.model.families.tensor_shapes import ExpertNames, Table, linears, norms

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource

_EXPERTS: Final = ExpertNames(block="mixer", gate="", up="up_proj", down="down_proj")
_PATTERN: Final = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def _read_nemotron_h(fields: Fields) -> ModelConfig:
    """Read a NemotronHConfig: each layer is Mamba-2, attention, an MLP or experts."""
    kinds = _read_kinds(fields)
    fields.require("residual_in_fp32", False)
    fields.ignore("norm_eps", "num_logits_to_keep", "rescale_prenorm_residual")
    if not fields.missing("sliding_window"):
        raise fields.unsupported("sliding_window", fields.optional("sliding_window"), "null")
    config = read_decoder(
        fields,
        n_layers=len(kinds),
        n_kv_heads=8,
        max_positions=4096,
        norm_key="layer_norm_epsilon",
        norm_eps=1e-5,
        head_size=fields.positive("attention_head_dim", 128),
        intermediate_size=21504,
        activation_key="mlp_hidden_act",
        activation="relu2",
    )
    fields.require("attention_head_dim", config.head_size)
    fields.require("rms_norm_eps", config.norm_eps)
    config = replace(
        config,
        mlp_bias=fields.take("mlp_bias", bool, False),
        nope_layers=tuple(range(config.n_layers)),
        mixerless_layers=layers_of(fields, kinds, len(kinds), "moe", "mlp"),
    )
    config = replace(config, delta_net=_read_own_mamba(fields, kinds))
    return _read_nemotron_experts(fields, config, kinds)


def _read_kinds(fields: Fields) -> list[Any]:
    """Read what each layer is, as a list or as a text with a letter for each."""
    kinds: list[Any] | None = fields.take(
        "layers_block_type", list, fields.take("layer_types", list, None)
    )
    pattern = fields.take("hybrid_override_pattern", str, "")
    if kinds is None:
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    if not 1 <= len(kinds) <= MAX_LAYERS:
        raise fields.damaged(f"it claims {len(kinds)} layers, expected 1 to {MAX_LAYERS}")
    return kinds


def _read_own_mamba(fields: Fields, kinds: list[Any]) -> DeltaNet | None:
    """Read the sizes of Mamba-2 with Nemotron-H's keys."""
    fields.require("mamba_hidden_act", "silu")
    fields.require("use_conv_bias", True)
    fields.require("use_bias", False)
    fields.require("mamba_proj_bias", False)
    fields.ignore("expand", "chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels")
    fields.ignore("time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    return read_sizes(
        fields,
        layers_of(fields, kinds, len(kinds), LINEAR, "mamba"),
        n_heads=fields.positive("mamba_num_heads", 128),
        head_size=fields.positive("mamba_head_dim", 64),
        n_groups=fields.positive("n_groups", 8),
        state_size=fields.positive("ssm_state_size", 128),
        n_taps=fields.positive("conv_kernel", 4, at_most=MOST_TAPS),
    )


def _read_nemotron_experts(fields: Fields, config: ModelConfig, kinds: list[Any]) -> ModelConfig:
    read = deepseek_v2.read_experts(fields, config, (8, 2), 7688, 0)
    shared = fields.positive("moe_shared_expert_intermediate_size", 7688)
    fields.require("n_shared_experts", 1)
    fields.ignore("moe_shared_expert_overlap", "mtp_layers_block_type")
    fields.ignore("mtp_hybrid_override_pattern")
    layers = layers_of(fields, kinds, len(kinds), "moe")
    if not layers or read.experts is None:
        return replace(read, experts=None)
    own = replace(read.experts, shared_intermediate_size=shared, layers=layers)
    return replace(read, experts=own)


def _single_tensors(config: ModelConfig, layer: int) -> Table:
    """Name one of four, and the norm before it."""
    prefix, hidden = f"model.layers.{layer}.mixer", config.hidden_size
    around = norms(config, layer, "norm")
    if has_mamba(config, layer):
        return around | mixer_tensors(config, prefix)
    if layer not in config.mixerless_layers:
        named = ATTENTION.tensors(config, layer)
        return around | {n.replace(".self_attn.", ".mixer."): s for n, s in named.items()}
    experts = config.layer_experts(layer)
    if experts is None:
        return around | _up_down(config, prefix, config.intermediate_size)
    made = around | {
        f"{prefix}.gate.weight": (experts.n_experts, hidden),
        f"{prefix}.gate.e_score_correction_bias": (experts.n_experts,),
    }
    for number in range(experts.n_experts):
        made |= _up_down(config, f"{prefix}.experts.{number}", experts.intermediate_size)
    shared = experts.shared_intermediate_size
    return made | _up_down(config, f"{prefix}.shared_experts", shared)


def _up_down(config: ModelConfig, prefix: str, inner: int) -> Table:
    hidden = config.hidden_size
    shapes = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return linears(prefix, shapes, with_bias=config.mlp_bias)


def _load_single(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`, which has one sub-layer."""
    from shardnet.model.layers.decoder_layer import (
        AttentionSublayer,
        ExpertsSublayer,
        Layer,
        MlpSublayer,
        NoSublayer,
        Residual,
    )
    from shardnet.model.layers.modules import PlainMlp, SelfAttention
    from shardnet.model.shards.cut import HEADS_EACH, Axis

    prefix = f"model.layers.{layer}.mixer"
    around = Residual(before=weights.norm(f"model.layers.{layer}.norm", config.norm_eps))
    if layer in config.mixerless_layers:
        nothing = NoSublayer(has_slot=True)
        if config.layer_experts(layer) is not None:
            sparse = _load_plain_experts(config, weights, prefix)
            return Layer(attention=nothing, mlp=ExpertsSublayer(residual=around, mlp=sparse))
        dense = PlainMlp.load(config, weights, f"{prefix}.up_proj", f"{prefix}.down_proj")
        return Layer(attention=nothing, mlp=MlpSublayer(residual=around, mlp=dense))
    mixer: Attention
    if has_mamba(config, layer):
        mixer = load_mixer(config, weights, prefix)
    else:
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        output = weights.linear(f"{prefix}.o_proj", inputs=Axis.HEADS)
        joined = weights.linear(*names, outputs=HEADS_EACH)
        mixer = SelfAttention.of(config, layer, joined, output)
    return Layer(attention=AttentionSublayer(residual=around, self_attn=mixer), mlp=NoSublayer())


def _load_plain_experts(config: ModelConfig, weights: WeightSource, prefix: str) -> SparseMlp:
    """Take experts without gates, chosen as DeepSeek-V3's."""
    from shardnet.model.layers.experts import BestTwoRouter, SparseMlp
    from shardnet.model.layers.modules import PlainMlp

    assert config.experts is not None

    def expert(name: str) -> PlainMlp:
        return PlainMlp.load(config, weights, f"{name}.up_proj", f"{name}.down_proj")

    router = BestTwoRouter(
        experts=config.experts,
        gate=weights.linear(f"{prefix}.gate", wide=True),
        bias=weights.parameter(f"{prefix}.gate.e_score_correction_bias"),
    )
    return SparseMlp(
        router=router,
        experts=[expert(f"{prefix}.experts.{n}") for n in range(config.experts.n_experts)],
        shared=expert(f"{prefix}.shared_experts"),
    )


def _read_nemotron_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata: layers without heads of keys or an MLP's width are Mamba-2."""
    n_layers, mamba = fields.positive("block_count", at_most=MAX_LAYERS), read_gguf_mamba(fields)
    n_heads, has_heads = read_gguf_kv_heads(fields, n_layers)
    widths = fields.take("feed_forward_length", list)
    if len(widths) != n_layers or any(type(width) is not int for width in widths):
        raise fields.damaged(f"feed_forward_length is {shown(widths)}, expected {n_layers} numbers")
    kinds = [
        (FULL if has_heads[n] else LINEAR)
        if not widths[n]
        else "moe"
        if f"blk.{n}.ffn_gate_inp.weight" in fields.tensors
        else "mlp"
        for n in range(n_layers)
    ]
    fields.ignore("attention.layer_norm_epsilon", "rope.dimension_count", "rope.freq_base")
    size = fields.positive("attention.key_length")
    fields.require("attention.value_length", size)
    fields.require("rope.scaling.finetuned", False)
    config = {
        "layers_block_type": kinds,
        "hidden_size": fields.positive("embedding_length"),
        "max_position_embeddings": fields.positive("context_length"),
        "intermediate_size": max(widths) or 1,
        "num_attention_heads": fields.positive("attention.head_count"),
        "num_key_value_heads": n_heads,
        "head_dim": size,
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon", within=NORM_EPS),
        "mamba_num_heads": mamba["heads"],
        "mamba_head_dim": mamba["inner"] // mamba["heads"],
        "n_groups": mamba["groups"],
        "ssm_state_size": mamba["state"],
        "conv_kernel": mamba["taps"],
    }
    if "moe" not in kinds:
        return config
    fields.require("expert_gating_func", 2)  # sigmoid
    experts = deepseek_v2.read_gguf_experts(fields)
    shared = fields.positive("expert_shared_feed_forward_length")
    return config | experts | {"moe_shared_expert_intermediate_size": shared}


FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    read_config=_read_nemotron_h,
    covers=lambda fields: fields.missing("moe_latent_size"),
    layer_tensors=_single_tensors,
    load_stage=decoder_stage(_load_single),
    experts=_EXPERTS,
    renamed_tensors=(
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
    ),
    gguf=GgufFormat(
        architecture="nemotron_h",
        multimodal=("nemotron_h_moe",),
        read=_read_nemotron_gguf,
        decay=".A_log",
        block_names=(
            ("norm.weight", "attn_norm.weight"),
            *((f"mixer.{own}", stored) for own, stored in OF_MAMBA),
            *((f"mixer.{n}_proj.weight", f"attn_{n}.weight") for n in "qkv"),
            ("mixer.o_proj.weight", "attn_output.weight"),
            *((f"mixer.{n}_proj.weight", f"ffn_{n}.weight") for n in ("up", "down")),
            ("mixer.gate.weight", "ffn_gate_inp.weight"),
            ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),
            *(
                (f"mixer.shared_experts.{n}_proj.weight", f"ffn_{n}_shexp.weight")
                for n in ("up", "down")
            ),
        ),
    ),
)
