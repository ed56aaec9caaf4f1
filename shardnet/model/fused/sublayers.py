"""Chooses the sub-layers that the compiled library computes, in one call each.

Knows what the library needs of a sub-layer. Must not know parameter names, wire or scheduling.

In small models and on fast machines, calling torch's operators takes as much of a decode step as
their work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardnet.model.arithmetic.row_functions import ACTIVATIONS
from shardnet.model.fused.attention import NativeAttention
from shardnet.model.fused.experts import NativeExperts
from shardnet.model.fused.mlp import NativeMlp
from shardnet.model.kernels.library import NativeKernels
from shardnet.model.kernels.linear import is_native
from shardnet.model.layers.decoder_layer import ExpertsSublayer, Layer, Sublayer
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.shards.gathered import NativeOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSublayers:
    """The sub-layers of one layer that the library computes, None where torch does."""

    attention: NativeAttention | None
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


def _native_attention(sublayer: Sublayer, kernels: NativeKernels) -> NativeAttention | None:
    parts = sublayer.fusible_attention
    if parts is None or not parts.residual.is_rms:
        return None
    own = parts.self_attn
    qkv, output = own.qkv_proj, NativeOutput.of(own.o_proj)
    if own.head_size > MAX_HEAD or own.head_size % 2 or output is None or not is_native(qkv):
        return None
    qk_norm = None if own.qk_norm is None else own.qk_norm.per_head
    if own.qk_norm is not None and qk_norm is None:
        return None
    return NativeAttention(parts.residual, own, qk_norm, qkv, output, kernels)


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
