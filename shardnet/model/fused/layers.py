"""All layers of a stage in one call of the compiled library.

Knows when that can be, and what stays from one call to the next. Must not know where weights come
from.

A step reads gigabytes of weights through the caches, so that whatever runs between two calls of the
library is read from memory again: Python between the halves of a layer took 150 µs and more there,
ten times what it takes where nothing else is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.model.fused.attention import NativeAttention
from shardnet.model.fused.mlp import NativeMlp
from shardnet.model.fused.structs import LayerStruct, aligned
from shardnet.model.kernels.library import NativeKernels, check_rows
from shardnet.model.layers.attention import Step
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.rotary import Rotary

_MAX_ROWS: Final = 64
"""With more rows it weighs nothing what runs between calls, and the call's memory would stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayOut:
    """Where all structs point, with rows of one kind and a number of threads.

    `rows` is where layers find and leave their rows, a part of the memory that the call works in.
    """

    rows: Tensor  # [T, E]
    n_threads: int

    def suits(self, hidden: Tensor) -> bool:
        """Say whether rows like these can be computed here, with as many threads as now."""
        rows = self.rows
        is_alike = rows.shape == hidden.shape and rows.dtype is hidden.dtype
        return is_alike and self.n_threads == torch.get_num_threads()


class NativeLayers:
    """The layers of a stage by the library. Not thread-safe: it keeps its call's arguments."""

    def __init__(
        self,
        halves: Sequence[tuple[NativeAttention, NativeMlp]],
        width: int,
        kernels: NativeKernels,
    ) -> None:
        """Take both halves of each layer, with `width` columns. Others may call them as well."""
        self._halves = [(attention.apart(), mlp.apart()) for attention, mlp in halves]
        self._width = width
        self._call = kernels.function(
            "shardnet_layers", ctypes.POINTER(LayerStruct), ctypes.c_int64
        )
        self._structs = (LayerStruct * len(halves))(
            *(
                LayerStruct(
                    attention=ctypes.addressof(attention.arguments),
                    mlp=ctypes.addressof(mlp.arguments),
                )
                for attention, mlp in self._halves
            )
        )
        self._lay_out: _LayOut | None = None

    @classmethod
    def of(cls, layers: Sequence[Layer], kernels: NativeKernels | None) -> NativeLayers | None:
        """Join layers; None unless both halves of each are the library's, with weights that stay
        where they are, as those of streamed layers do not."""
        halves = []
        for layer in layers:
            attention, mlp = layer.attention, layer.mlp
            if not isinstance(attention, NativeAttention) or not isinstance(mlp, NativeMlp):
                return None
            products = (*attention.products, *mlp.products)
            if not all(product.weights_stay for product in products):
                return None
            halves.append((attention, mlp))
        if kernels is None or not halves:
            return None
        return cls(halves, halves[0][0].products[1].shape[0], kernels)

    def __call__(self, hidden: Tensor, rotaries: Sequence[Rotary], step: Step) -> Tensor | None:
        """Run all layers, each with its rotary tables: [T, E] in and out.

        Returns None where the library cannot do all of it, as with chunks of prompts, and for many
        rows. Raises ValueError where rows, rotary tables and step do not belong together.
        """
        if step.places is None or step.places.has_chunks or len(hidden) > _MAX_ROWS:
            return None
        place = self._place(hidden)
        place.rows.copy_(hidden)
        for index, ((attention, _), rotary) in enumerate(zip(self._halves, rotaries, strict=True)):
            if not attention.look(place.rows, index, rotary, step):
                return None
        self._call(self._structs, len(self._halves))
        return place.rows.clone()

    def _place(self, hidden: Tensor) -> _LayOut:
        """Return where rows like `hidden` are computed; all structs point there."""
        place = self._lay_out
        if place is None or not place.suits(hidden):
            self._lay_out = None  # its memory is not needed while the next is made
            self._lay_out = place = self._new_place(hidden)
        return place

    def _new_place(self, hidden: Tensor) -> _LayOut:
        check_rows(hidden, self._width)
        halves = [half for layer in self._halves for half in layer]
        row_bytes = aligned(hidden.nbytes)
        room_bytes = max(half.room_bytes(hidden) for half in halves)
        memory = torch.empty(2 * row_bytes + room_bytes, dtype=torch.uint8)
        between, after = (
            memory[begin : begin + hidden.nbytes].view(hidden.dtype).view(hidden.shape)
            for begin in (0, row_bytes)
        )
        room = memory[2 * row_bytes :]
        for attention, mlp in self._halves:
            attention.arguments.residual.enter(between, after)
            attention.lay_out(room, between)
            mlp.arguments.residual.enter(after, between)
            mlp.lay_out(room, after)
        return _LayOut(rows=between, n_threads=torch.get_num_threads())
