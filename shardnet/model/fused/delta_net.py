"""A gated DeltaNet's sub-layer in one call of the compiled library.

Knows the struct of the call and the layout of its buffers. Must not know the other sub-layers:
fused/layers.py chooses among them.

Axes in shape comments: T rows of the micro-batch, E hidden size.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.fused.structs import (
    NativeSublayer,
    ResidualStruct,
    aligned,
    check_shape,
    is_joined,
)
from shardnet.model.kernels.library import SCRATCH, NativeKernels, check_memory, fields
from shardnet.model.kernels.linear import is_native
from shardnet.model.kernels.recurrence import RecurrenceStruct, mixed_bytes
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import AttentionSublayer
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.gated_delta import GatedDeltaNet, Projections
from shardnet.model.shards.gathered import JoinedLinear
from shardnet.model.shards.group import JoinedStruct

RowTensors = tuple[Tensor, Tensor, Tensor] | tuple[()]
"""Inputs of the recurrence: columns [B + T, C], writes and decays [T, H]."""
_NOWHERE: Final = (torch.empty(0),) * 3
"""In their place: their address is 0."""


class DeltaSpanStruct(ctypes.Structure):
    """`struct delta_span` of csrc/delta_net.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "recent", "recurrent", "recent_before", "recurrent_before"),
        *fields(ctypes.c_void_p, "rows", "write", "decay"),
        *fields(ctypes.c_int64, "start", "end"),
    )


class DeltaStruct(ctypes.Structure):
    """`struct delta_call` of csrc/delta_net.c."""

    _fields_ = (
        ("residual", ResidualStruct),
        *fields(ctypes.c_void_p, "qkvz", "ba", "output"),
        *fields(JoinedStruct, "qkvz_joined", "joined"),
        ("scratch", ctypes.c_void_p),
        ("recurrence", RecurrenceStruct),
        ("spans", ctypes.c_void_p),
        ("n_spans", ctypes.c_int64),
        *fields(ctypes.c_void_p, "projected", "small", "rows", "gate", "write", "decay"),
        ("outputs", ctypes.c_void_p),
        *fields(ctypes.c_int32, "groups_qkvz", "groups_ba"),
    )


class NativeDeltaNet(NativeSublayer[DeltaStruct]):
    """The sub-layer by the library."""

    FIELD = "delta"
    """Of a LayerStruct."""

    def __init__(
        self,
        plain: AttentionSublayer,
        own: GatedDeltaNet,
        groups: tuple[bool, bool],
        linears: tuple[JoinedLinear, JoinedLinear, JoinedLinear],
        kernels: NativeKernels,
    ) -> None:
        assert own.native is not None
        config, (qkvz, ba, output) = own.config, linears
        width = output.shape[0]
        n_columns = config.mixed_width + config.value_width
        check_shape("qkvz_proj", qkvz, n_columns, width)
        check_shape("ba_proj", ba, 2 * config.n_value_heads, width)
        check_shape("out_proj", output, width, config.value_width)
        self._plain = plain
        self._own, self._config = own, config
        self._qkvz, self._output = qkvz, output
        self.linears = tuple(linear.linear for linear in linears)
        """Its linear layers: queries, keys, values and gate; write and decay; output."""
        self._call = kernels.function("shardnet_delta_net", ctypes.POINTER(DeltaStruct))
        self._arguments = DeltaStruct(
            residual=ResidualStruct.of(plain.residual, width, kernels),
            qkvz_joined=qkvz.joined,
            joined=output.joined,
            recurrence=own.native.arguments,
            groups_qkvz=groups[0],
            groups_ba=groups[1],
        )
        self._spans = (DeltaSpanStruct * 0)()
        self._states: list[tuple[SlotState, int, RowTensors]] = []

    @classmethod
    def of(cls, sublayer: AttentionSublayer, kernels: NativeKernels) -> NativeDeltaNet | None:
        """Take a DeltaNet; None unless the library computes all of it.

        Raises ValueError for linears whose shapes do not fit together.
        """
        own = sublayer.self_attn
        if not isinstance(own, GatedDeltaNet) or own.native is None:
            return None
        project = own.project
        if not isinstance(project, Projections) or not is_joined(sublayer.residual):
            return None
        qkvz, output = JoinedLinear.of(project.qkvz_proj), JoinedLinear.of(own.out_proj)
        ba = project.ba_proj
        if qkvz is None or not is_native(ba) or output is None or own.config.has_key_decays:
            return None
        groups = (project.groups_qkvz, project.groups_ba)
        return cls(sublayer, own, groups, (qkvz, JoinedLinear(ba), output), kernels)

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        if not self.bind_step(hidden, index, rotary, step):
            return self._plain(hidden, index, rotary, step)
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self.residual.bind_rows(hidden, out)
        self.assign_buffers(SCRATCH.at_least(self.scratch_bytes(hidden)), hidden)
        self._call(self._arguments)
        self.after_call()
        return out

    def bind_step(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> bool:
        """Point the arguments to the states of a step's slots in layer `index`.

        Returns True: the library can run any step. Raises ValueError for states of other memory, or
        spans of other rows.
        """
        if step.spans[-1].end != len(hidden):
            raise ValueError(f"{len(hidden)} rows are not the {step.spans[-1].end} of the step")
        self._states = []
        structs = []
        for span in step.spans:
            state, n_rows = step.kv.state(span.slot, index), span.end - span.start
            before = state.keep_before(n_rows, span.n_drafts)
            for held in (state,) if before is state else (state, before):
                self._check_state(held, hidden)
            rows = self._kept_rows(hidden, n_rows) if state.kept else ()
            self._states.append((state, n_rows, rows))
            structs.append(
                DeltaSpanStruct(
                    state.recent.data_ptr(),
                    state.recurrent.data_ptr(),
                    before.recent.data_ptr(),
                    before.recurrent.data_ptr(),
                    *(tensor.data_ptr() for tensor in rows or _NOWHERE),
                    span.start,
                    span.end,
                )
            )
        self._spans = (DeltaSpanStruct * len(structs))(*structs)
        self._arguments.spans = ctypes.addressof(self._spans)
        self._arguments.n_spans = len(step.spans)
        return True

    def _check_state(self, state: SlotState, hidden: Tensor) -> None:
        own = self._config
        recent_bytes = (own.n_taps - 1) * own.mixed_width * hidden.itemsize
        check_memory("the rows before", state.recent, recent_bytes, hidden.dtype)
        n_bytes = 4 * own.key_size * own.value_width
        check_memory("a state", state.recurrent, n_bytes, torch.float32)

    def _kept_rows(self, hidden: Tensor, n_rows: int) -> RowTensors:
        """Make room for the inputs of rows that are kept: see RowInputs."""
        own = self._config
        rows = hidden.new_empty(own.n_taps - 1 + n_rows, own.mixed_width)
        write, decay = torch.empty(2, n_rows, own.n_value_heads)
        return rows, write, decay

    def after_call(self) -> None:
        """Note how far the states of the bound step are."""
        for state, n_rows, rows in self._states:
            state.count(n_rows, self._own.replay(*rows) if rows else None)
        self._states = []

    def scratch_bytes(self, hidden: Tensor) -> int:
        """Return the scratch memory of a call with rows like `hidden`, in bytes."""
        buffers = sum(aligned(size) for size in self._buffers(hidden).values())
        return self.residual.inner_bytes(len(hidden), hidden.itemsize) + buffers

    def assign_buffers(self, scratch: Tensor, hidden: Tensor) -> None:
        """Point the arguments to the linear layers, and to buffers at the start of `scratch`."""
        arguments, at = self._arguments, scratch.data_ptr()
        matmuls = (linear.native_matmul().address for linear in self.linears)
        arguments.qkvz, arguments.ba, arguments.output = matmuls
        sizes = (len(hidden), hidden.itemsize)
        arguments.residual.assign_inner(at, *sizes)
        at += arguments.residual.inner_bytes(*sizes)
        for name, size in self._buffers(hidden).items():
            holder = {"mixed": arguments.recurrence, "part": arguments.joined}.get(name, arguments)
            setattr(holder, name, at)
            at += aligned(size)
        arguments.qkvz_joined.part = arguments.joined.part

    def _buffers(self, hidden: Tensor) -> dict[str, int]:
        """Return the sizes in bytes of the buffers, by their fields."""
        own, item, n_rows = self._config, hidden.itemsize, len(hidden)
        values = n_rows * own.value_width
        parts = [linear.buffer_bytes(n_rows, item)[1] for linear in (self._qkvz, self._output)]
        row_bytes = max(linear.native_matmul().row_bytes for linear in self.linears)
        return {
            "projected": (n_rows * own.mixed_width + values) * item,
            "small": 2 * n_rows * own.n_value_heads * item,
            "rows": (own.n_taps - 1 + n_rows) * own.mixed_width * item,
            "gate": values * item,
            "write": 4 * n_rows * own.n_value_heads,
            "decay": 4 * n_rows * own.n_value_heads,
            "mixed": n_rows * mixed_bytes(own),
            "outputs": values * item,
            "part": max(parts),
            "scratch": n_rows * row_bytes,
        }
