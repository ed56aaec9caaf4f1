"""Ling 3 (transformers, modeling_bailing_hybrid.py): KDA in most layers, gated latents in others.

The decays of its KDA are bounded and, as the gates, of full rank. DeepSeek-V3's latents turn as
there, each head with a gate; so do its experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.model.config.decoder_config import FULL, LINEAR, read_layer_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import Range
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, kimi_linear
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS, Part
from shardnet.model.families.tensor_shapes import Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource

FLOORS: Final = Range(-80.0, -1e-6)
"""Of the logarithm of a decay: below them it is no normal number of float32."""


def _read_config(fields: Fields) -> ModelConfig:
    """Read a BailingHybridConfig, or what its makers publish."""
    size = fields.positive("linear_head_dim", fields.positive("head_dim", 128))
    fields = kimi_linear.renamed(fields)
    fields.ignore("linear_head_dim", "mtp_loss_scaling_factor")
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=True,
        max_positions=262144,
        defaults=kimi_linear.LATENT,
        rope=partial(read_rope, theta=6e6),
    )
    delta_net = _read_delta_net(fields, config, size)
    config = replace(config, delta_net=delta_net)
    config = deepseek_v2.read_experts(
        fields, config, (512, 8), 768, 2, n_groups=8, top_groups=4, output_scale=2.5
    )
    fields.note_the_rest()
    return config


def _read_delta_net(fields: Fields, config: ModelConfig, size: int) -> DeltaNet | None:
    """Read KDA, whose heads are as many as those of latents, of `size` columns."""
    for key in ("linear_num_heads", "num_attention_heads"):
        fields.require(key, config.n_heads)
    taps = fields.positive("short_conv_kernel_size", 4, at_most=kimi_linear.MOST_TAPS)
    fields.require("linear_conv_kernel_dim", taps)
    period = fields.positive("layer_group_size", 6)
    kinds = read_layer_kinds(fields, config.n_layers, FULL, LINEAR)
    kinds = kinds or [LINEAR if (n + 1) % period else FULL for n in range(config.n_layers)]
    floor = fields.number("kda_lower_bound", -5.0, within=FLOORS)
    is_bounded = fields.take("kda_safe_gate", bool, True)
    layers = (n for n, kind in enumerate(kinds) if kind == LINEAR)
    floor = floor if is_bounded else 0.0
    return kimi_linear.kda(fields, layers, config.n_heads, size, taps, floor)


def _mixer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name KDA or latent attention with its gates."""
    own, attn = config.delta_net, f"model.layers.{layer}.self_attn"
    if own is None or layer not in own.layers:
        gate = linears(attn, {"g_proj": (config.n_heads, config.hidden_size)})
        return LATENT_HEADS.tensors(config, layer) | gate
    gates = {f"{name}_proj": (own.key_width, config.hidden_size) for name in "fg"}
    decays = {"A_log": (own.n_value_heads,), "dt_bias": (own.key_width,)}
    return kimi_linear.delta_tensors(config, own, attn, gates, decays)


def _load_mixer(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
    from shardnet.model.mixers.gated_delta import Projections
    from shardnet.model.mixers.latent_attention import LatentAttention

    own, attn = config.delta_net, f"model.layers.{layer}.self_attn"
    if own is not None and layer in own.layers:
        project = Projections(
            config=own,
            qkvz_proj=weights.linear(*(f"{attn}.{name}_proj" for name in "qkvg")),
            ba_proj=weights.linear(*(f"{attn}.{name}_proj" for name in "bf"), precise=True),
        )
        return kimi_linear.load_delta_net(
            config, weights, attn, project, gates_alone=True, decay_floor=own.decay_floor
        )
    plain = LatentAttention.load(config, weights, layer)
    return replace(plain, gate_proj=weights.linear(f"{attn}.g_proj"))


FAMILY = record(
    "bailing_hybrid",
    "BailingHybridForCausalLM",
    _read_config,
    Layout(attention=Part(tensors=_mixer_tensors, load=_load_mixer), mlp=DEEPSEEK_EXPERTS),
    renamed_tensors=(
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".gate.expert_bias", ".gate.e_score_correction_bias"),
    ),
    **STACKED,
    has_whole_heads=True,
)
