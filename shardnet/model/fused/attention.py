"""The attention sub-layer in one call of the compiled library.

Knows the parts of the call and the layout of its buffers. Must not know which sub-layers the
library can compute: fused/sublayers.py does. For soft-capped scores, sinks and prompt chunks, torch
attends between two calls of the library.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

import ctypes
from copy import copy
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.fused.structs import (
    AFTER,
    ATTEND,
    BEFORE,
    STORE,
    AttentionStruct,
    NormStruct,
    ResidualStruct,
    aligned,
    check_shape,
)
from shardnet.model.kernels.library import SCRATCH, NativeKernels
from shardnet.model.kernels.linear import NativeLinear
from shardnet.model.layers.attention import ForwardStep, attend_chunk, attention
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import HeadNorm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import kv_groups

_LANES: Final = 16
"""The library's vector width in columns: quantised groups must be multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionScratch:
    """The buffers of a call that torch may need, as byte ranges of `bytes`."""

    bytes: Tensor
    dtype: torch.dtype
    n_rows: int
    head_size: int
    projected_at: tuple[int, int]
    attended_at: tuple[int, int]

    def projected(self) -> Tensor:
        """Queries, keys and values: [T, H + 2 KV heads, D]."""
        return self._heads(self.projected_at)

    def attended(self) -> Tensor:
        """Outputs of attention: [T, H, D]."""
        return self._heads(self.attended_at)

    def _heads(self, place: tuple[int, int]) -> Tensor:
        begin, end = place
        return self.bytes[begin:end].view(self.dtype).view(self.n_rows, -1, self.head_size)


class NativeAttention:
    """An AttentionSublayer by the library. Not thread-safe: it holds the arguments of its calls."""

    def __init__(
        self,
        residual: Residual,
        own: SelfAttention,
        qk_norm: HeadNorm | None,
        qkv: NativeLinear,
        output: NativeLinear,
        kernels: NativeKernels,
    ) -> None:
        n_heads = own.n_heads + 2 * own.n_kv_heads
        check_shape("o_proj", output, output.shape[0], own.n_heads * own.head_size)
        check_shape("qkv_proj", qkv, n_heads * own.head_size, output.shape[0])
        self._own = own
        self._qkv = qkv
        self._output = output
        self._residual = residual
        self._call = kernels.function(
            "shardnet_attention", ctypes.POINTER(AttentionStruct), ctypes.c_int32
        )
        scale = own.kind.scale
        self._arguments = AttentionStruct(
            residual=ResidualStruct.of(residual, output.shape[0], kernels),
            head_norm=NormStruct.of(qk_norm, own.n_heads + own.n_kv_heads, own.head_size),
            n_heads=own.n_heads,
            n_kv_heads=own.n_kv_heads,
            head_size=own.head_size,
            window=own.kind.window or 0,
            scale=own.head_size**-0.5 if scale is None else scale,
        )

    @property
    def linears(self) -> tuple[NativeLinear, NativeLinear]:
        """Its linear layers: queries, keys and values; output."""
        return self._qkv, self._output

    @property
    def fusible_attention(self) -> None:
        """None: it is fused already."""

    @property
    def fusible_mlp(self) -> None:
        """None: it is no MLP."""

    @property
    def arguments(self) -> AttentionStruct:
        """The arguments of its calls, valid as long as this object lives."""
        return self._arguments

    def with_own_arguments(self) -> NativeAttention:
        """Return a copy with separate call arguments, which calls of this one do not change."""
        other = copy(self)
        other._arguments = AttentionStruct.from_buffer_copy(self._arguments)
        return other

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E].

        Raises ValueError if rows, rotary tables and step do not match.
        """
        hidden, arguments = hidden.contiguous(), self._arguments
        out = torch.empty_like(hidden)
        arguments.residual.bind_rows(hidden, out)
        can_attend = self.bind_step(hidden, index, rotary, step)
        scratch = self.assign_buffers(SCRATCH.at_least(self.scratch_bytes(hidden)), hidden)
        if not can_attend:
            self._call(arguments, BEFORE)
            scratch.attended().copy_(self._attend_in_torch(scratch.projected(), index, step))
            self._call(arguments, AFTER)
            return out
        if step.native_spans is not None and not step.native_spans.has_chunks:
            self._call(arguments, BEFORE | STORE | ATTEND | AFTER)
            return out
        self._call(arguments, BEFORE | STORE | ATTEND)
        self._attend_chunks(scratch.projected(), scratch.attended(), index, step)
        self._call(arguments, AFTER)
        return out

    def bind_step(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> bool:
        """Point the arguments to the positions and slots of a step with rows [T, E].

        Returns whether the library can attend for all rows but prompt chunks. Raises ValueError if
        rows, rotary tables and step do not match.
        """
        self._check_call(hidden, index, rotary, step)
        arguments, native_spans = self._arguments, step.native_spans
        arguments.cos = rotary.cos.data_ptr()
        arguments.sin = rotary.sin.data_ptr()
        arguments.n_rotated = rotary.cos.shape[-1]
        arguments.layer = index
        if native_spans is None or not self._can_attend(step.kv):
            return False
        arguments.spans = native_spans.address
        arguments.n_spans = len(native_spans.slots)
        return True

    def _check_call(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> None:
        """Raise ValueError if the library would read or write out of bounds."""
        cos, sin, n_rows = rotary.cos, rotary.sin, hidden.shape[0]
        if len(cos) != n_rows or cos.shape != sin.shape or cos.shape[-1] > self._own.head_size:
            raise ValueError(f"rotary tables {list(cos.shape)}, {list(sin.shape)} of {n_rows} rows")
        if not cos.dtype is sin.dtype is step.kv.dtype is hidden.dtype:
            raise ValueError(f"rows are {hidden.dtype}; {cos.dtype}, {step.kv.dtype} go with them")
        native_spans = step.native_spans
        if native_spans is None:
            return
        if step.spans[-1].end != n_rows or index >= len(native_spans.slots[0]):
            raise ValueError(f"layer {index} and {n_rows} rows are not those of the step")

    def _can_attend(self, kv: KvCache) -> bool:
        """Describe how the slots store keys and values. False if the library cannot read them."""
        arguments, size = self._arguments, self._own.head_size
        arguments.group = 0
        arguments.row_bytes = size * kv.dtype.itemsize
        if kv.is_quantized:
            n_groups, group = kv_groups(size)
            if group % _LANES or n_groups * group != size:
                return False
            arguments.group = group
            arguments.row_bytes = size + n_groups * torch.bfloat16.itemsize
        return self._own.kind.is_plain

    def scratch_bytes(self, hidden: Tensor) -> int:
        """Return the scratch memory of a call with rows like `hidden`, in bytes."""
        return self._parts(hidden)[-1]

    def assign_buffers(self, scratch: Tensor, hidden: Tensor) -> _AttentionScratch:
        """Point the arguments to the linear layers, and to buffers at the start of `scratch`."""
        own, arguments = self._own, self._arguments
        arguments.qkv = self._qkv.native_matmul().address
        arguments.output = self._output.native_matmul().address
        n_rows, item = hidden.shape[0], hidden.element_size()
        projected, attended, linear_scratch, _ = self._parts(hidden)
        begin = scratch.data_ptr()
        arguments.residual.inner = begin
        arguments.projected = begin + projected
        arguments.attended = begin + attended
        arguments.scratch = begin + linear_scratch
        n_looking, n_attended = self._qkv.shape[0], self._output.shape[1]
        return _AttentionScratch(
            bytes=scratch,
            dtype=hidden.dtype,
            n_rows=n_rows,
            head_size=own.head_size,
            projected_at=(projected, projected + n_rows * n_looking * item),
            attended_at=(attended, attended + n_rows * n_attended * item),
        )

    def _parts(self, hidden: Tensor) -> tuple[int, int, int, int]:
        """Return the offsets of a call's buffers, and their total size, in bytes.

        In order: normalized rows (at 0), projected rows, attended rows, scratch of the linears.
        """
        n_rows, item = hidden.shape[0], hidden.element_size()
        qkv, output = self._qkv.native_matmul(), self._output.native_matmul()
        projected = aligned(n_rows * output.shape[0] * item)
        attended = projected + aligned(n_rows * qkv.shape[0] * item)
        linear_scratch = attended + aligned(n_rows * output.shape[1] * item)
        end = linear_scratch + n_rows * max(qkv.row_bytes, output.row_bytes)
        return projected, attended, linear_scratch, end

    def _attend_in_torch(self, projected: Tensor, index: int, step: ForwardStep) -> Tensor:
        own = self._own
        n_rotated = own.n_heads + own.n_kv_heads
        queries, keys = projected[:, : own.n_heads], projected[:, own.n_heads : n_rotated]
        attended = attention(queries, keys, projected[:, n_rotated:], index, step, own.kind)
        return attended.view(-1, own.n_heads, own.head_size)

    def _attend_chunks(
        self, projected: Tensor, attended: Tensor, index: int, step: ForwardStep
    ) -> None:
        own = self._own
        widths = (own.head_size, own.head_size)
        for span in step.spans:
            if span.masks is not None:
                queries = projected[span.start : span.end, : own.n_heads]
                chunk = attend_chunk(queries, span, index, step, own.kind, widths)
                attended[span.start : span.end] = chunk
