"""The MLP half of a layer in one call of the compiled library.

Knows where its rows lie in memory. Must not know which layers can be computed so:
fused/sublayers.py does.
"""

from __future__ import annotations

import ctypes
from copy import copy

import torch
from torch import Tensor

from shardnet.model.config.model_config import Activation
from shardnet.model.fused.structs import (
    ACTIVATIONS,
    MlpStruct,
    NativeLinearProduct,
    ResidualStruct,
    aligned,
    check_shape,
)
from shardnet.model.kernels.library import ROOM, NativeKernels
from shardnet.model.layers.attention import Step
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.rotary import Rotary


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

    @property
    def products(self) -> tuple[NativeLinearProduct, NativeLinearProduct]:
        """What it multiplies with."""
        return self._gate_up, self._down

    @property
    def arguments(self) -> MlpStruct:
        """What the library is given, as long as this object lives."""
        return self._arguments

    def apart(self) -> NativeMlp:
        """Return the same half with arguments of its own, which calls of this one do not touch."""
        other = copy(self)
        other._arguments = MlpStruct.from_buffer_copy(self._arguments)
        return other

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self._arguments.residual.enter(hidden, out)
        self.lay_out(ROOM.of(self.room_bytes(hidden)), hidden)
        self._call(self._arguments)
        return out

    def room_bytes(self, hidden: Tensor) -> int:
        """Return the memory that a call with rows like `hidden` works in."""
        return self._parts(hidden)[-1]

    def lay_out(self, room: Tensor, hidden: Tensor) -> None:
        """Give a call with rows like `hidden` its products, and memory at the head of `room`."""
        arguments = self._arguments
        arguments.gate_up = self._gate_up.native_product().address
        arguments.down = self._down.native_product().address
        active, gated, product, _ = self._parts(hidden)
        begin = room.data_ptr()
        arguments.residual.inner = begin
        arguments.active = begin + active
        arguments.gated = begin + gated
        arguments.room = begin + product

    def _parts(self, hidden: Tensor) -> tuple[int, int, int, int]:
        """Return where the parts of a call's memory begin, and where all of it ends.

        They are the rows between norm and product, active and gated ones, and the products' own.
        """
        n_rows, item = hidden.shape[0], hidden.element_size()
        gate_up, down = self._gate_up.native_product(), self._down.native_product()
        active = aligned(n_rows * down.shape[0] * item)
        inner = aligned(n_rows * self._n_inner * item)
        product = active + 3 * inner
        return (
            active,
            active + inner,
            product,
            product + n_rows * max(gate_up.row_bytes, down.row_bytes),
        )
