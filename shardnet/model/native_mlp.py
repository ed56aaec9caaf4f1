"""The MLP half of a layer in one call of the compiled library.

Knows where its rows lie in memory. Must not know which layers can be computed so: native_half.py
does.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.config import Activation
from shardnet.model.halves import Residual
from shardnet.model.native import ROOM, NativeKernels
from shardnet.model.native_structs import (
    ACTIVATIONS,
    MlpStruct,
    NativeLinearProduct,
    ResidualStruct,
    aligned,
    check_shape,
)
from shardnet.model.rotary import Rotary


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
        check_shape("gate_up_proj", gate_up, 2 * self._n_inner, n_out)
        self._gate_up = gate_up
        self._down = down
        self._residual = residual
        self._call = kernels.function("shardnet_mlp_half", ctypes.POINTER(MlpStruct))
        self._arguments = MlpStruct(
            residual=ResidualStruct.of(residual, n_out, kernels),
            n_inner=self._n_inner,
            activation=ACTIVATIONS[activation],
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
        inner = aligned(hidden.numel() * item)
        active = aligned(n_rows * self._n_inner * item)
        product = n_rows * max(gate_up.row_bytes, down.row_bytes)
        begin = ROOM.of(inner + 3 * active + product).data_ptr()
        arguments.residual.inner = begin
        arguments.active = begin + inner
        arguments.gated = begin + inner + active
        arguments.room = begin + inner + 3 * active
