"""The attention half of a layer in one call of the compiled library.

Knows the call's parts and where its rows lie in memory. Must not know which layers can be computed
so: fused/sublayers.py does. Scores that are capped, sinks and prompt chunks stay torch's: it
attends between two calls of the library.
"""

from __future__ import annotations

import ctypes
from copy import copy
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.model.fused.structs import (
    AFTER,
    ATTEND,
    BEFORE,
    STORE,
    AttentionStruct,
    NativeLinearProduct,
    NormStruct,
    ResidualStruct,
    aligned,
    check_shape,
)
from shardnet.model.kernels.library import ROOM, NativeKernels
from shardnet.model.layers.attention import Step, attend_chunk, attention
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.kv_cache import KvCache
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import HeadNorm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import kv_groups

_LANES: Final = 16
"""Columns that the library takes together: rounded groups must have whole numbers of them."""


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
        check_shape("o_proj", output, output.shape[0], own.n_heads * own.head_size)
        check_shape("qkv_proj", qkv, n_heads * own.head_size, output.shape[0])
        self._own = own
        self._qkv = qkv
        self._output = output
        self._residual = residual
        self._call = kernels.function(
            "shardnet_attention_half", ctypes.POINTER(AttentionStruct), ctypes.c_int32
        )
        scale = own.kind.scale
        self._arguments = AttentionStruct(
            residual=ResidualStruct.of(residual, output.shape[0], kernels),
            heads=NormStruct.of(qk_norm, own.n_heads + own.n_kv_heads, own.head_size),
            n_heads=own.n_heads,
            n_kv_heads=own.n_kv_heads,
            head_size=own.head_size,
            window=own.kind.window or 0,
            scale=own.head_size**-0.5 if scale is None else scale,
        )

    @property
    def products(self) -> tuple[NativeLinearProduct, NativeLinearProduct]:
        """What it multiplies with."""
        return self._qkv, self._output

    @property
    def arguments(self) -> AttentionStruct:
        """What the library is given, as long as this object lives."""
        return self._arguments

    def apart(self) -> NativeAttention:
        """Return the same half with arguments of its own, which calls of this one do not touch."""
        other = copy(self)
        other._arguments = AttentionStruct.from_buffer_copy(self._arguments)
        return other

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out.

        Raises ValueError where rows, rotary tables and step do not belong together.
        """
        hidden, arguments = hidden.contiguous(), self._arguments
        out = torch.empty_like(hidden)
        arguments.residual.enter(hidden, out)
        can_attend = self.look(hidden, index, rotary, step)
        room = self.lay_out(ROOM.of(self.room_bytes(hidden)), hidden)
        if not can_attend:
            self._call(arguments, BEFORE)
            room.attended().copy_(self._attend_in_torch(room.looking(), index, step))
            self._call(arguments, AFTER)
            return out
        if step.places is not None and not step.places.has_chunks:
            self._call(arguments, BEFORE | STORE | ATTEND | AFTER)
            return out
        self._call(arguments, BEFORE | STORE | ATTEND)
        self._attend_chunks(room.looking(), room.attended(), index, step)
        self._call(arguments, AFTER)
        return out

    def look(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> bool:
        """Say where rows [T, E] of a step stand and what they look at.

        Returns whether the library can attend over all of it but prompt chunks. Raises ValueError
        where rows, rotary tables and step do not belong together.
        """
        self._check_call(hidden, index, rotary, step)
        arguments, places = self._arguments, step.places
        arguments.cos = rotary.cos.data_ptr()
        arguments.sin = rotary.sin.data_ptr()
        arguments.n_rotated = rotary.cos.shape[-1]
        arguments.layer = index
        if places is None or not self._can_attend(step.kv):
            return False
        arguments.spans = places.address
        arguments.n_spans = len(places.slots)
        return True

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

    def room_bytes(self, hidden: Tensor) -> int:
        """Return the memory that a call with rows like `hidden` works in."""
        return self._parts(hidden)[-1]

    def lay_out(self, room: Tensor, hidden: Tensor) -> _AttentionRoom:
        """Give a call with rows like `hidden` its products, and memory at the head of `room`."""
        own, arguments = self._own, self._arguments
        arguments.qkv = self._qkv.native_product().address
        arguments.output = self._output.native_product().address
        n_rows, item = hidden.shape[0], hidden.element_size()
        looking, attended, product, _ = self._parts(hidden)
        begin = room.data_ptr()
        arguments.residual.inner = begin
        arguments.looking = begin + looking
        arguments.attended = begin + attended
        arguments.room = begin + product
        n_looking, n_attended = self._qkv.shape[0], self._output.shape[1]
        return _AttentionRoom(
            bytes=room,
            dtype=hidden.dtype,
            n_rows=n_rows,
            head_size=own.head_size,
            looking_at=(looking, looking + n_rows * n_looking * item),
            attended_at=(attended, attended + n_rows * n_attended * item),
        )

    def _parts(self, hidden: Tensor) -> tuple[int, int, int, int]:
        """Return where queries, results and the products' memory begin, and where all of it ends.

        At the beginning are the rows between norm and product.
        """
        n_rows, item = hidden.shape[0], hidden.element_size()
        qkv, output = self._qkv.native_product(), self._output.native_product()
        looking = aligned(n_rows * output.shape[0] * item)
        attended = looking + aligned(n_rows * qkv.shape[0] * item)
        product = attended + aligned(n_rows * output.shape[1] * item)
        return looking, attended, product, product + n_rows * max(qkv.row_bytes, output.row_bytes)

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
