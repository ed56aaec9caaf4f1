"""Which halves of layers the compiled library computes, in one call each.

Knows the parts that a half must have. Must not know parameter names, wire or scheduling.

In small models and on fast machines a decode step costs as much in calls of torch's operators as in
what they do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from shardnet.model.fused.attention import NativeAttention
from shardnet.model.fused.mlp import NativeMlp
from shardnet.model.fused.structs import ACTIVATIONS, MAX_HEAD, NativeLinearProduct
from shardnet.model.kernels.library import NativeKernels, NativeSource
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.decoder_layer import AttentionHalf, Half, Layer, MlpHalf
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import HeadNorm


def with_native_halves(layer: Layer, kernels: NativeKernels | None) -> Layer:
    """Have the library compute the halves that it can, where there is one."""
    if kernels is None:
        return layer
    return replace(
        layer,
        attention=_native_attention(layer.attention, kernels),
        mlp=_native_mlp(layer.mlp, kernels),
    )


def _native_attention(half: Half, kernels: NativeKernels) -> Half:
    if not isinstance(half, AttentionHalf) or not isinstance(half.self_attn, SelfAttention):
        return half
    own, qkv, output = half.self_attn, half.self_attn.qkv_proj, half.self_attn.o_proj
    if own.qk_norm is not None and not isinstance(own.qk_norm, HeadNorm):
        return half
    if own.head_size > MAX_HEAD or own.head_size % 2 or not half.residual.is_rms:
        return half
    if not (_is_native(qkv) and _is_native(output)):
        return half
    return NativeAttention(half.residual, own, own.qk_norm, qkv, output, kernels)


def _native_mlp(half: Half, kernels: NativeKernels) -> Half:
    if not isinstance(half, MlpHalf) or half.mlp.activation not in ACTIVATIONS:
        return half
    gate_up, down = half.mlp.gate_up_proj, half.mlp.down_proj
    if not (_is_native(gate_up) and _is_native(down) and half.residual.is_rms):
        return half
    return NativeMlp(half.residual, half.mlp.activation, gate_up, down, kernels)


def _is_native(linear: Linear) -> TypeGuard[NativeLinearProduct]:
    return isinstance(linear, NativeSource) and linear.is_native
