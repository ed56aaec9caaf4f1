"""The MLP sub-layer in one call of the compiled library.

Knows the layout of its buffers. Must not know which sub-layers the library can compute:
fused/sublayers.py does.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import ACTIVATIONS
from shardnet.model.config.model_config import Activation
from shardnet.model.fused.structs import (
    MlpStruct,
    NativeSublayer,
    ResidualStruct,
    aligned,
    check_shape,
)
from shardnet.model.kernels.library import SCRATCH, NativeKernels
from shardnet.model.kernels.linear import NativeLinear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.rotary import Rotary
from shardnet.model.shards.gathered import NativeOutput


class NativeMlp(NativeSublayer[MlpStruct]):
    """An MlpSublayer by the library."""

    FIELD = "mlp"
    """Of a LayerStruct."""

    def __init__(
        self,
        residual: Residual,
        activation: Activation,
        gate_up: NativeLinear,
        down: NativeOutput,
        kernels: NativeKernels,
    ) -> None:
        n_out, self._n_inner = down.shape[0], down.n_own_in
        check_shape("gate_up_proj", gate_up, 2 * self._n_inner, n_out)
        self._gate_up = gate_up
        self._down = down
        self._kept = residual
        self._call = kernels.function("shardnet_mlp", ctypes.POINTER(MlpStruct))
        self._arguments = MlpStruct(
            residual=ResidualStruct.of(residual, n_out, kernels),
            n_inner=self._n_inner,
            joined=down.joined,
            activation=ACTIVATIONS[activation],
        )

    @property
    def linears(self) -> tuple[NativeLinear, NativeLinear]:
        """Its linear layers: gate and up, down."""
        return self._gate_up, self._down.linear

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
        arguments.residual.inner = begin
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
        activated = aligned(n_rows * self._down.shape[0] * item)
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
