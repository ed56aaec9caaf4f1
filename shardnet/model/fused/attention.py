"""The attention and MLP sub-layers, each in one call of the compiled library.

Where the library cannot read the KV cache, torch attends between two calls of it.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.fused.structs import (
    AFTER,
    ATTEND,
    BEFORE,
    STORE,
    AttentionStruct,
    MlpStruct,
    NativeSublayer,
    ResidualStruct,
    aligned,
    check_shape,
    norm_struct,
)
from shardnet.model.kernels.library import SCRATCH, NativeKernels
from shardnet.model.kernels.linear import NativeLinear
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.native_attention import attend_struct, bind_slots
from shardnet.model.layers.norms import HeadNorm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.mixed_attention import GatedAttention
from shardnet.model.shards.gathered import JoinedLinear


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


class NativeAttention(NativeSublayer[AttentionStruct]):
    """An AttentionSublayer by the library."""

    FIELD = "attention"
    """Of a LayerStruct."""

    def __init__(
        self,
        residual: Residual,
        own: SelfAttention | GatedAttention,
        qk_norm: HeadNorm | None,
        qkv: JoinedLinear,
        output: JoinedLinear,
        kernels: NativeKernels,
    ) -> None:
        n_heads = own.n_heads + 2 * own.n_kv_heads
        if output.n_own_in != own.n_heads * own.head_size:
            raise ValueError(f"o_proj has {output.n_own_in} inputs for {own.n_heads} heads")
        gates = dict.fromkeys(("gate_columns", "gates_behind", "gates_soft"), 0)
        if isinstance(own, GatedAttention):
            gates = {name: int(getattr(own, name)) for name in gates}
        self._gate_size = own.n_heads * gates["gate_columns"]
        n_projected = n_heads * own.head_size + self._gate_size
        check_shape("qkv_proj", qkv, n_projected, output.shape[0])
        self._own = own
        self._qkv = qkv
        self._output = output
        self.linears = (qkv.linear, output.linear)
        """Its linear layers: queries, keys and values; output."""
        self._kept = residual
        self._call = kernels.function(
            "shardnet_attention", ctypes.POINTER(AttentionStruct), ctypes.c_int32
        )
        attend = attend_struct(own.kind, own.n_heads, own.n_kv_heads, own.head_size, own.head_size)
        attend.row_stride = n_heads * own.head_size
        self._arguments = AttentionStruct(
            residual=ResidualStruct.of(residual, output.shape[0], kernels),
            head_norm=norm_struct(qk_norm, own.n_heads + own.n_kv_heads, own.head_size),
            attend=attend,
            qkv_joined=qkv.joined,
            joined=output.joined,
            **gates,
        )

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
        self._call(arguments, BEFORE | STORE | ATTEND | AFTER)
        return out

    def bind_step(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> bool:
        """Point the arguments to the positions and slots of a step with rows [T, E].

        Returns whether the library can attend. Raises ValueError if rows, rotary tables and step do
        not match.
        """
        self._check_call(hidden, rotary, step)
        arguments, native_spans = self._arguments, step.native_spans
        arguments.cos = rotary.cos.data_ptr()
        arguments.sin = rotary.sin.data_ptr()
        arguments.n_rotated = rotary.cos.shape[-1]
        if native_spans is None:
            return False
        return bind_slots(arguments.attend, native_spans, index, step.kv)

    def _check_call(self, hidden: Tensor, rotary: Rotary, step: ForwardStep) -> None:
        """Raise ValueError if the library would read or write out of bounds."""
        cos, sin, n_rows = rotary.cos, rotary.sin, hidden.shape[0]
        if len(cos) != n_rows or cos.shape != sin.shape or cos.shape[-1] > self._own.head_size:
            raise ValueError(f"rotary tables {list(cos.shape)}, {list(sin.shape)} of {n_rows} rows")
        if not cos.dtype is sin.dtype is step.kv.dtype is hidden.dtype:
            raise ValueError(f"rows are {hidden.dtype}; {cos.dtype}, {step.kv.dtype} go with them")
        if step.native_spans is not None and step.native_spans.n_rows != n_rows:
            raise ValueError(f"{n_rows} rows are not the {step.native_spans.n_rows} of the step")

    def scratch_bytes(self, hidden: Tensor) -> int:
        """Return the scratch memory of a call with rows like `hidden`, in bytes."""
        return self._parts(hidden)[-1]

    def assign_buffers(self, scratch: Tensor, hidden: Tensor) -> _AttentionScratch:
        """Point the arguments to the linear layers, and to buffers at the start of `scratch`."""
        own, arguments = self._own, self._arguments
        arguments.qkv = self._qkv.linear.native_matmul().address
        arguments.output = self._output.linear.native_matmul().address
        n_rows, item = hidden.shape[0], hidden.element_size()
        projected, attended, rows, part, gates, linear_scratch, _ = self._parts(hidden)
        begin = scratch.data_ptr()
        arguments.residual.assign_inner(begin, n_rows, item)
        if self._gate_size:
            arguments.gates = begin + gates
            arguments.with_gates = begin + gates + aligned(n_rows * self._gate_size * item)
        arguments.projected = arguments.attend.queries = begin + projected
        arguments.attend.attended = begin + attended
        arguments.joined.rows, arguments.joined.part = begin + rows, begin + part
        arguments.qkv_joined.part = begin + part
        arguments.scratch = begin + linear_scratch
        n_looking, n_attended = self._n_looking, self._output.n_own_in
        return _AttentionScratch(
            bytes=scratch,
            dtype=hidden.dtype,
            n_rows=n_rows,
            head_size=own.head_size,
            projected_at=(projected, projected + n_rows * n_looking * item),
            attended_at=(attended, attended + n_rows * n_attended * item),
        )

    @property
    def _n_looking(self) -> int:
        """Columns of a row's queries, keys and values."""
        return self._qkv.shape[0] - self._gate_size

    def after_call(self) -> None:
        """Do nothing: keys and values are in their slots."""

    def _parts(self, hidden: Tensor) -> tuple[int, int, int, int, int, int, int]:
        """Return the offsets of a call's buffers, and their total size, in bytes.

        In order: normalized rows (at 0), projected rows, attended rows, those of all shards, own
        outputs, gates and projected rows with gates, scratch of the linears.
        """
        n_rows, item = hidden.shape[0], hidden.element_size()
        qkv, output = (linear.native_matmul() for linear in self.linears)
        rows_bytes, part_bytes = self._output.buffer_bytes(n_rows, item)
        part_bytes = max(part_bytes, self._qkv.buffer_bytes(n_rows, item)[1])
        projected = self.residual.inner_bytes(n_rows, item)
        attended = projected + aligned(n_rows * self._n_looking * item)
        rows = attended + aligned(n_rows * self._output.n_own_in * item)
        part = rows + aligned(rows_bytes)
        gates = part + aligned(part_bytes)
        linear_scratch = gates
        if self._gate_size:
            own, with_gates = (n_rows * n * item for n in (self._gate_size, self._qkv.shape[0]))
            linear_scratch += aligned(own) + aligned(with_gates)
        end = linear_scratch + n_rows * max(qkv.row_bytes, output.row_bytes)
        return projected, attended, rows, part, gates, linear_scratch, end

    def _attend_in_torch(self, projected: Tensor, index: int, step: ForwardStep) -> Tensor:
        own = self._own
        n_rotated = own.n_heads + own.n_kv_heads
        queries, keys = projected[:, : own.n_heads], projected[:, own.n_heads : n_rotated]
        attended = attention(queries, keys, projected[:, n_rotated:], index, step, own.kind)
        return attended.view(-1, own.n_heads, own.head_size)


class NativeMlp(NativeSublayer[MlpStruct]):
    """An MlpSublayer by the library."""

    FIELD = "mlp"
    """Of a LayerStruct."""

    def __init__(
        self,
        residual: Residual,
        activation: Mapping[str, float],
        gate_up: NativeLinear,
        down: JoinedLinear,
        kernels: NativeKernels,
    ) -> None:
        n_out, self._n_inner = down.shape[0], down.n_own_in
        check_shape("gate_up_proj", gate_up, 2 * self._n_inner, n_out)
        self._gate_up = gate_up
        self._down = down
        self.linears = (gate_up, down.linear)
        """Its linear layers: gate and up, down."""
        self._kept = residual
        self._call = kernels.function("shardnet_mlp", ctypes.POINTER(MlpStruct))
        self._arguments = MlpStruct(
            residual=ResidualStruct.of(residual, n_out, kernels),
            n_inner=self._n_inner,
            joined=down.joined,
            **activation,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self._arguments.residual.bind_rows(hidden, out)
        self.assign_buffers(SCRATCH.at_least(self.scratch_bytes(hidden)), hidden)
        self._call(self._arguments)
        return out

    def scratch_bytes(self, hidden: Tensor) -> int:
        """Return the scratch memory of a call with rows like `hidden`, in bytes."""
        return self._parts(hidden)[-1]

    def assign_buffers(self, scratch: Tensor, hidden: Tensor) -> None:
        """Point the arguments to the linear layers, and to buffers at the start of `scratch`."""
        arguments = self._arguments
        arguments.gate_up = self._gate_up.native_matmul().address
        arguments.down = self._down.linear.native_matmul().address
        activated, projected, rows, part, linear_scratch, _ = self._parts(hidden)
        begin = scratch.data_ptr()
        arguments.residual.assign_inner(begin, len(hidden), hidden.element_size())
        arguments.activated = begin + activated
        arguments.projected = begin + projected
        arguments.joined.rows, arguments.joined.part = begin + rows, begin + part
        arguments.scratch = begin + linear_scratch

    def _parts(self, hidden: Tensor) -> tuple[int, int, int, int, int, int]:
        """Return the offsets of a call's buffers, and their total size, in bytes.

        In order: normalized rows (at 0), activated rows, projected rows, the activated ones of all
        shards, own outputs, scratch of the linears.
        """
        n_rows, item = hidden.shape[0], hidden.element_size()
        gate_up, down = self._gate_up.native_matmul(), self._down.linear.native_matmul()
        rows_bytes, part_bytes = self._down.buffer_bytes(n_rows, item)
        activated = self.residual.inner_bytes(n_rows, item)
        inner = aligned(n_rows * self._n_inner * item)
        rows = activated + 3 * inner
        part = rows + aligned(rows_bytes)
        linear_scratch = part + aligned(part_bytes)
        return (
            activated,
            activated + inner,
            rows,
            part,
            linear_scratch,
            linear_scratch + n_rows * max(gate_up.row_bytes, down.row_bytes),
        )
