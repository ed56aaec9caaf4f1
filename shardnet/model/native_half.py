"""The halves of a layer in one call of the compiled library each.

Knows which halves it can compute, and csrc/halves.c, whose structs are here again. Must not know
parameter names, wire or scheduling.

In small models and on fast machines a decode step costs as much in calls of torch's operators as in
what they do. Scores that are capped, sinks and prompt chunks stay torch's: it attends between two
calls of the library.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeGuard

import torch
from torch import Tensor

from shardnet.model.attention import Step, attend_chunk, attention
from shardnet.model.blocks import SelfAttention
from shardnet.model.config import Activation
from shardnet.model.halves import AttentionHalf, Half, Layer, MlpHalf, Residual
from shardnet.model.kernels import Linear
from shardnet.model.kv_cache import KvCache
from shardnet.model.layers import HeadNorm, Norm
from shardnet.model.native import (
    ROOM,
    NativeKernels,
    NativeSource,
    Team,
    check_memory,
    check_rows,
    is_bf16,
)
from shardnet.model.rotary import Rotary
from shardnet.types import kv_groups

_BEFORE: Final = 1
_STORE: Final = 2
_ATTEND: Final = 4
_AFTER: Final = 8
_MAX_HEAD: Final = 256
_LANES: Final = 16
"""Columns that the library takes together: rounded groups must have whole numbers of them."""
_ALIGNMENT: Final = 64
_ACTIVATIONS: Final = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU_NEW: 1,
    Activation.RELU: 2,
}


class NativeLinearProduct(Linear, NativeSource, Protocol):
    """A product of the library, for a layer."""


class _Norm(ctypes.Structure):
    """`struct norm` of csrc/halves.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )

    @classmethod
    def of(cls, norm: Norm | HeadNorm | None, *shape: int) -> _Norm:
        """Point to a norm with weights of `shape` that outlives this. Raises ValueError."""
        if norm is None:
            return cls(weight=None, eps=0.0, is_bf16=0)
        weight = norm.weight
        check_memory("a norm", weight, math.prod(shape) * weight.itemsize)
        return cls(weight=weight.data_ptr(), eps=norm.eps, is_bf16=is_bf16(weight))


class _Residual(ctypes.Structure):
    """`struct residual` of csrc/halves.c."""

    _fields_ = (
        ("before", _Norm),
        ("after", _Norm),
        ("hidden", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("multiplier", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("team", Team),
    )

    @classmethod
    def of(cls, residual: Residual, width: int, kernels: NativeKernels) -> _Residual:
        """Say what stays from call to call."""
        return cls(
            before=_Norm.of(residual.before, width),
            after=_Norm.of(residual.after, width),
            width=width,
            multiplier=residual.multiplier,
            team=kernels.team,
        )

    def enter(self, hidden: Tensor, out: Tensor) -> None:
        """Say what is of this call. Raises ValueError for rows that cannot be read."""
        self.n_rows = check_rows(hidden, self.width)
        self.hidden = hidden.data_ptr()
        self.out = out.data_ptr()
        self.is_bf16 = is_bf16(hidden)
        self.team.n_threads = torch.get_num_threads()


class _AttentionArguments(ctypes.Structure):
    """`struct attention_half` of csrc/halves.c."""

    _fields_ = (
        ("residual", _Residual),
        ("heads", _Norm),
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("looking", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("n_spans", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("n_heads", ctypes.c_int64),
        ("n_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("n_rotated", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _MlpArguments(ctypes.Structure):
    """`struct mlp_half` of csrc/halves.c."""

    _fields_ = (
        ("residual", _Residual),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("n_inner", ctypes.c_int64),
        ("activation", ctypes.c_int32),
    )


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
    if own.head_size > _MAX_HEAD or own.head_size % 2 or not half.residual.is_rms:
        return half
    if not (_is_native(qkv) and _is_native(output)):
        return half
    return NativeAttention(half.residual, own, own.qk_norm, qkv, output, kernels)


def _native_mlp(half: Half, kernels: NativeKernels) -> Half:
    if not isinstance(half, MlpHalf) or half.mlp.activation not in _ACTIVATIONS:
        return half
    gate_up, down = half.mlp.gate_up_proj, half.mlp.down_proj
    if not (_is_native(gate_up) and _is_native(down) and half.residual.is_rms):
        return half
    return NativeMlp(half.residual, half.mlp.activation, gate_up, down, kernels)


def _is_native(linear: Linear) -> TypeGuard[NativeLinearProduct]:
    return isinstance(linear, NativeSource) and linear.is_native


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionRoom:
    """Where a call has what torch may have to work with."""

    bytes: Tensor
    dtype: torch.dtype
    n_rows: int
    head_size: int
    looking_at: tuple[int, int]
    attended_at: tuple[int, int]

    def looking(self) -> Tensor:
        """Queries, keys and values: [T, H + 2 KV heads, D]."""
        return self._heads(self.looking_at)

    def attended(self) -> Tensor:
        """What was found: [T, H, D]."""
        return self._heads(self.attended_at)

    def _heads(self, place: tuple[int, int]) -> Tensor:
        begin, end = place
        return self.bytes[begin:end].view(self.dtype).view(self.n_rows, -1, self.head_size)


class NativeAttention:
    """An AttentionHalf by the library. Not thread-safe: it keeps its call's arguments."""

    def __init__(
        self,
        residual: Residual,
        own: SelfAttention,
        qk_norm: HeadNorm | None,
        qkv: NativeLinearProduct,
        output: NativeLinearProduct,
        kernels: NativeKernels,
    ) -> None:
        n_heads = own.n_heads + 2 * own.n_kv_heads
        _check_shape("o_proj", output, output.shape[0], own.n_heads * own.head_size)
        _check_shape("qkv_proj", qkv, n_heads * own.head_size, output.shape[0])
        self._own = own
        self._qkv = qkv
        self._output = output
        self._residual = residual
        self._call = kernels.function(
            "shardnet_attention_half", ctypes.POINTER(_AttentionArguments), ctypes.c_int32
        )
        scale = own.kind.scale
        self._arguments = _AttentionArguments(
            residual=_Residual.of(residual, output.shape[0], kernels),
            heads=_Norm.of(qk_norm, own.n_heads + own.n_kv_heads, own.head_size),
            n_heads=own.n_heads,
            n_kv_heads=own.n_kv_heads,
            head_size=own.head_size,
            window=own.kind.window or 0,
            scale=own.head_size**-0.5 if scale is None else scale,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out.

        Raises ValueError where rows, rotary tables and step do not belong together.
        """
        hidden, arguments = hidden.contiguous(), self._arguments
        self._check_call(hidden, index, rotary, step)
        out = torch.empty_like(hidden)
        arguments.residual.enter(hidden, out)
        arguments.cos = rotary.cos.data_ptr()
        arguments.sin = rotary.sin.data_ptr()
        arguments.n_rotated = rotary.cos.shape[-1]
        arguments.layer = index
        room = self._lay_out(hidden)
        places = step.places
        if places is None or not self._can_attend(step.kv):
            self._call(arguments, _BEFORE)
            room.attended().copy_(self._attend_in_torch(room.looking(), index, step))
            self._call(arguments, _AFTER)
            return out
        arguments.spans = places.spans.ctypes.data
        arguments.n_spans = len(places.slots)
        if not places.has_chunks:
            self._call(arguments, _BEFORE | _STORE | _ATTEND | _AFTER)
            return out
        self._call(arguments, _BEFORE | _STORE | _ATTEND)
        self._attend_chunks(room.looking(), room.attended(), index, step)
        self._call(arguments, _AFTER)
        return out

    def _check_call(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> None:
        """Raise ValueError where the library would look beyond what belongs to the rows."""
        cos, sin, n_rows = rotary.cos, rotary.sin, hidden.shape[0]
        if len(cos) != n_rows or cos.shape != sin.shape or cos.shape[-1] > self._own.head_size:
            raise ValueError(f"rotary tables {list(cos.shape)}, {list(sin.shape)} of {n_rows} rows")
        if not cos.dtype is sin.dtype is step.kv.dtype is hidden.dtype:
            raise ValueError(f"rows are {hidden.dtype}; {cos.dtype}, {step.kv.dtype} go with them")
        places = step.places
        if places is None:
            return
        if step.spans[-1].end != n_rows or index >= len(places.slots[0]):
            raise ValueError(f"layer {index} and {n_rows} rows are not those of the step")

    def _can_attend(self, kv: KvCache) -> bool:
        """Say how keys and values lie in the slots. False where the library cannot read them."""
        arguments, size = self._arguments, self._own.head_size
        arguments.group = 0
        arguments.kept_bytes = size * kv.dtype.itemsize
        if kv.is_rounded:
            n_groups, group = kv_groups(size)
            if group % _LANES or n_groups * group != size:
                return False
            arguments.group = group
            arguments.kept_bytes = size + n_groups * torch.bfloat16.itemsize
        return self._own.kind.is_plain

    def _lay_out(self, hidden: Tensor) -> _AttentionRoom:
        """Give the call its products and memory."""
        own, arguments = self._own, self._arguments
        qkv, output = self._qkv.native_product(), self._output.native_product()
        arguments.qkv, arguments.output = qkv.address, output.address
        n_rows, item = hidden.shape[0], hidden.element_size()
        inner = _aligned(hidden.numel() * item)
        looking = _aligned(n_rows * qkv.shape[0] * item)
        attended = _aligned(n_rows * output.shape[1] * item)
        product = n_rows * max(qkv.row_bytes, output.row_bytes)
        room = ROOM.of(inner + looking + attended + product)
        begin = room.data_ptr()
        arguments.residual.inner = begin
        arguments.looking = begin + inner
        arguments.attended = begin + inner + looking
        arguments.room = begin + inner + looking + attended
        return _AttentionRoom(
            bytes=room,
            dtype=hidden.dtype,
            n_rows=n_rows,
            head_size=own.head_size,
            looking_at=(inner, inner + n_rows * qkv.shape[0] * item),
            attended_at=(inner + looking, inner + looking + n_rows * output.shape[1] * item),
        )

    def _attend_in_torch(self, looking: Tensor, index: int, step: Step) -> Tensor:
        own = self._own
        n_turned = own.n_heads + own.n_kv_heads
        queries, keys = looking[:, : own.n_heads], looking[:, own.n_heads : n_turned]
        attended = attention(queries, keys, looking[:, n_turned:], index, step, own.kind)
        return attended.view(-1, own.n_heads, own.head_size)

    def _attend_chunks(self, looking: Tensor, attended: Tensor, index: int, step: Step) -> None:
        own = self._own
        widths = (own.head_size, own.head_size)
        for span in step.spans:
            if span.masks is not None:
                queries = looking[span.start : span.end, : own.n_heads]
                chunk = attend_chunk(queries, span, index, step, own.kind, widths)
                attended[span.start : span.end] = chunk


class NativeMlp:
    """An MlpHalf by the library. Not thread-safe: it keeps its call's arguments."""

    def __init__(
        self,
        residual: Residual,
        activation: Activation,
        gate_up: NativeLinearProduct,
        down: NativeLinearProduct,
        kernels: NativeKernels,
    ) -> None:
        n_out, self._n_inner = down.shape
        _check_shape("gate_up_proj", gate_up, 2 * self._n_inner, n_out)
        self._gate_up = gate_up
        self._down = down
        self._residual = residual
        self._call = kernels.function("shardnet_mlp_half", ctypes.POINTER(_MlpArguments))
        self._arguments = _MlpArguments(
            residual=_Residual.of(residual, n_out, kernels),
            n_inner=self._n_inner,
            activation=_ACTIVATIONS[activation],
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self._arguments.residual.enter(hidden, out)
        self._lay_out(hidden)
        self._call(self._arguments)
        return out

    def _lay_out(self, hidden: Tensor) -> None:
        """Give the call its products and memory."""
        arguments = self._arguments
        gate_up, down = self._gate_up.native_product(), self._down.native_product()
        arguments.gate_up, arguments.down = gate_up.address, down.address
        n_rows, item = hidden.shape[0], hidden.element_size()
        inner = _aligned(hidden.numel() * item)
        active = _aligned(n_rows * self._n_inner * item)
        product = n_rows * max(gate_up.row_bytes, down.row_bytes)
        begin = ROOM.of(inner + 3 * active + product).data_ptr()
        arguments.residual.inner = begin
        arguments.active = begin + inner
        arguments.gated = begin + inner + active
        arguments.room = begin + inner + 3 * active


def _check_shape(name: str, product: Linear, n_out: int, n_in: int) -> None:
    if product.shape != (n_out, n_in):
        raise ValueError(f"{name} has shape {product.shape}, the layer wants {(n_out, n_in)}")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
