"""Chooses the sub-layers that the compiled library computes, in one call each.

Knows what the library needs of a sub-layer. Must not know parameter names, wire or scheduling.

In small models and on fast machines, calling torch's operators takes as much of a decode step as
their work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardnet.model.arithmetic.row_functions import ACTIVATIONS
from shardnet.model.fused.attention import NativeAttention
from shardnet.model.fused.delta_net import NativeDeltaNet
from shardnet.model.fused.experts import NativeExperts
from shardnet.model.fused.mlp import NativeMlp
from shardnet.model.kernels.library import NativeKernels
from shardnet.model.kernels.linear import Linear, is_native
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    Layer,
    Residual,
    Sublayer,
)
from shardnet.model.layers.gated_attention import GatedAttention
from shardnet.model.layers.gated_delta import GatedDeltaNet
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.layers.norms import HeadNorm
from shardnet.model.shards.gathered import NativeOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSublayers:
    """The sub-layers of one layer that the library computes, None where torch does."""

    attention: NativeAttention | NativeDeltaNet | None
    mlp: NativeMlp | NativeExperts | None

    @classmethod
    def of(cls, layer: Layer, kernels: NativeKernels | None) -> NativeSublayers:
        """Make those sub-layers that the library can compute; without a library there are none.

        Raises ValueError for norms and linears whose shapes do not fit together.
        """
        if kernels is None:
            return cls(attention=None, mlp=None)
        return cls(
            attention=_native_attention(layer.attention, kernels),
            mlp=_native_mlp(layer.mlp, kernels),
        )

    def replace_in(self, layer: Layer) -> Layer:
        """Return `layer` with these sub-layers in place of torch's; itself if there are none."""
        if self.attention is None and self.mlp is None:
            return layer
        return replace(
            layer, attention=self.attention or layer.attention, mlp=self.mlp or layer.mlp
        )


def _native_attention(
    sublayer: Sublayer, kernels: NativeKernels
) -> NativeAttention | NativeDeltaNet | None:
    if isinstance(sublayer, AttentionSublayer) and sublayer.residual.is_rms:
        if isinstance(sublayer.self_attn, GatedAttention):
            gated = sublayer.self_attn
            projection, norm = gated.qkvg_proj, gated.qk_norm
            return _joined_attention(sublayer.residual, gated, norm, projection, kernels)
        if isinstance(sublayer.self_attn, GatedDeltaNet):
            return NativeDeltaNet.of(sublayer, kernels)
    parts = sublayer.fusible_attention
    if parts is None or not parts.residual.is_rms:
        return None
    own = parts.self_attn
    qk_norm = None if own.qk_norm is None else own.qk_norm.per_head
    if own.qk_norm is not None and qk_norm is None:
        return None
    return _joined_attention(parts.residual, own, qk_norm, own.qkv_proj, kernels)


def _joined_attention(
    residual: Residual,
    own: SelfAttention | GatedAttention,
    qk_norm: HeadNorm | None,
    projection: Linear,
    kernels: NativeKernels,
) -> NativeAttention | None:
    output = NativeOutput.of(own.o_proj)
    if own.head_size > MAX_HEAD or own.head_size % 2 or output is None:
        return None
    if not is_native(projection):
        return None
    return NativeAttention(residual, own, qk_norm, projection, output, kernels)


def _native_mlp(sublayer: Sublayer, kernels: NativeKernels) -> NativeMlp | NativeExperts | None:
    if isinstance(sublayer, ExpertsSublayer):
        is_rms = sublayer.residual.is_rms
        return NativeExperts.of(sublayer.residual, sublayer.mlp, kernels) if is_rms else None
    parts = sublayer.fusible_mlp
    if parts is None or not parts.residual.is_rms or parts.mlp.activation not in ACTIVATIONS:
        return None
    gate_up, down = parts.mlp.gate_up_proj, NativeOutput.of(parts.mlp.down_proj)
    if down is None or not is_native(gate_up):
        return None
    return NativeMlp(parts.residual, parts.mlp.activation, gate_up, down, kernels)
