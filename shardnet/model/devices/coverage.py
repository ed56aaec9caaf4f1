"""Which layers the kernel text computes.

Knows all kinds of layers. Must not know launches, nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.model.devices.device_attention import why_no_attention
from shardnet.model.devices.device_choice import linears_of_index, why_no_choice
from shardnet.model.devices.device_entries import why_no_entries
from shardnet.model.devices.device_experts import gating_of, linears_of, why_no_experts
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_latents import why_no_latents
from shardnet.model.devices.device_ngrams import why_no_ngrams
from shardnet.model.devices.device_recurrence import why_no_recurrence
from shardnet.model.devices.device_streams import why_no_streams
from shardnet.model.devices.products import can_multiply
from shardnet.model.kernels.linear import Linear, ScaledLinear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    Layer,
    MlpSublayer,
    NoSublayer,
    StreamResidual,
    Sublayer,
)
from shardnet.model.layers.experts import ClampedMlp
from shardnet.model.layers.modules import Attention, BothMixers, GatedMlp, PlainMlp, SelfAttention
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.layers.norms import Norm
from shardnet.model.mixers.compressed_attention import CompressedAttention, SharingSublayer
from shardnet.model.mixers.gated_delta import GatedDeltaNet
from shardnet.model.mixers.latent_attention import LatentAttention
from shardnet.model.mixers.mixed_attention import GatedAttention, TemperedAttention
from shardnet.model.mixers.short_conv import NgramSublayer, ShortConvolution


def why_not(layers: Sequence[object], kv: DeviceKvCache) -> str:
    """Say what the text does not compute of a stage, "" for nothing."""
    if kv.is_quantized:
        return "keys and values in int8"
    for layer in layers:
        if not isinstance(layer, Layer) or layer.scale != 1:
            return "layers that are no attention and MLP"
        for sublayer in (layer.attention, layer.mlp):
            if why := _why_no_sublayer(sublayer):
                return why
    return ""


def _why_no_sublayer(sublayer: Sublayer) -> str:
    why = ""
    match sublayer:
        case NoSublayer():
            return ""
        case AttentionSublayer():
            why = _why_no_mixer(sublayer.self_attn)
        case ExpertsSublayer():
            why = why_no_experts(sublayer.mlp, _is_multiplied)
        case MlpSublayer():
            why = _why_no_mlp(sublayer.mlp)
        case SharingSublayer() | NgramSublayer(attention=SharingSublayer()):
            return "entries that layers share"
        case NgramSublayer(attention=AttentionSublayer(self_attn=GatedDeltaNet())):
            why = why_no_ngrams(sublayer.features, _is_multiplied)
            return why or _why_no_sublayer(sublayer.attention)
        case _:
            return "layers that are no attention and MLP"
    if isinstance(sublayer.residual, StreamResidual):
        return why or why_no_streams(sublayer.residual, _is_multiplied)
    if why or not sublayer.residual.is_rms:
        return why or "this norm"
    norms = sublayer.residual.before, sublayer.residual.after
    widths = {norm.weight.shape[0] for norm in norms if isinstance(norm, Norm)}
    return next((f"rows of {width} columns" for width in widths if width % 4), "")


def _why_no_mixer(own: Attention) -> str:
    if isinstance(own, BothMixers):
        return _why_no_mixer(own.recurrence) or _why_no_mixer(own.self_attn)
    if isinstance(own, TemperedAttention):
        return _why_no_mixer(own.inner)
    if isinstance(own, GatedDeltaNet):
        return why_no_recurrence(own, _is_computed)
    if isinstance(own, CompressedAttention):
        return why_no_entries(own, _is_computed)
    if isinstance(own, ShortConvolution):
        linears = [own.in_proj, own.out_proj]
    elif isinstance(own, LatentAttention):
        if why := why_no_latents(own):
            return why
        queries = own.queries
        linears = [queries.first, queries.q_b_proj or queries.first, own.kv_a_proj, own.o_proj]
        linears += [own.gate_proj or own.o_proj, *linears_of_index(own.indexer)]
    else:
        if why := why_no_attention(own):
            return why
        assert isinstance(own, SelfAttention | GatedAttention)
        if own.head_size > MAX_HEAD or own.head_size % 2:
            return f"heads of {own.head_size} columns"
        indexer = own.indexer if isinstance(own, GatedAttention) else None
        if why := why_no_choice(indexer):
            return why
        linears = [projection_of(own), own.o_proj, *linears_of_index(indexer)]
    return _why_no_linears(linears)


def projection_of(own: SelfAttention | GatedAttention) -> Linear:
    """Return the linear of queries, keys and values."""
    return own.qkvg_proj if isinstance(own, GatedAttention) else own.qkv_proj


def _why_no_mlp(own: GatedMlp | ClampedMlp | PlainMlp) -> str:
    if gating_of(own) is None:
        return "this activation"
    return _why_no_linears(linears_of(own))


def _why_no_linears(linears: Sequence[Linear]) -> str:
    if all(map(_is_computed, linears)):
        return ""
    return "linears whose weights do not stay packed in memory"


def _is_computed(linear: Linear) -> bool:
    return _is_multiplied(linear.plain if isinstance(linear, ScaledLinear) else linear)


def _is_multiplied(linear: Linear) -> bool:
    if not isinstance(linear, PanelLinear) or not linear.is_native:
        return False
    return all(can_multiply(part.form) for part in linear.parts)
