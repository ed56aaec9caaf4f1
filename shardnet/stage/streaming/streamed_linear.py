"""Products whose weights are read from disk whenever their layer is at work.

Knows what is made of the bytes that were read, and when. Must not know who reads them, nor names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.families.stage_tensors import Shape
from shardnet.model.kernels.bf16_linear import NativeLinear, PanelPacking, fills_panels
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import (
    NativeKernels,
    NativeProduct,
    NativeSource,
    native_kernels,
)
from shardnet.model.kernels.linear import (
    Kernel,
    KernelChoice,
    Linear,
    PlainLinear,
    join_biases,
    make_linear,
)
from shardnet.stage.streaming.layer_stream import LayerStream


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProduct:
    """What a product is made of that reads its weights as a checkpoint stores them.

    `stored` is the shape of the weights one behind the other: [N, K], or [K, N] where they are
    `transposed`. What the library multiplies is packed as it is read, where panels do not go over
    from one weight to the next; what oneDNN does, and what is turned, when its layer is at work.
    """

    choice: KernelChoice
    device: torch.device
    stored: tuple[int, int]
    transposed: bool
    biases: Sequence[Tensor]
    bias: Tensor | None
    native: NativeKernels | None
    packing: PanelPacking | None

    @classmethod
    def of(
        cls,
        choice: KernelChoice,
        device: torch.device,
        shapes: Sequence[Shape],
        biases: Sequence[Tensor],
        *,
        transposed: bool,
    ) -> StoredProduct:
        """Join weights that are stored in `shapes`, of which one alone may be transposed."""
        assert not transposed or len(shapes) == 1
        native = native_kernels() if choice.kernel is Kernel.NATIVE else None
        n_in, packing = shapes[0][1], None
        if native is not None and not transposed and fills_panels([shape[0] for shape in shapes]):
            packing = PanelPacking(native=native, n_in=n_in)
        own = [bias.clone() for bias in biases]
        return cls(
            choice=choice,
            device=device,
            stored=(sum(shape[0] for shape in shapes), n_in),
            transposed=transposed,
            biases=own,
            bias=join_biases(own, device, torch_dtype(choice.dtype)),
            native=native,
            packing=packing,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.stored[::-1] if self.transposed else self.stored

    @property
    def is_native(self) -> bool:
        """Whether the compiled library multiplies."""
        return self.native is not None

    @property
    def is_ready(self) -> bool:
        """Whether the bytes that were read are what is multiplied with."""
        return self.packing is not None or self._is_plain

    @property
    def _is_plain(self) -> bool:
        return self.choice.kernel is Kernel.PLAIN and not self.transposed

    def read_bytes(self, stored_bytes: int) -> int:
        """Return what so many stored bytes take when they have been read."""
        return stored_bytes if self.packing is None else self.packing.packed_bytes(stored_bytes)

    def make(self, read: Tensor) -> Linear:
        """Make the product of the bytes [read_bytes] that were read, uint8."""
        if self.native is not None and self.packing is not None:
            return NativeLinear(read, self.stored, self.bias, self.native)
        weight = read.view(torch_dtype(self.choice.stored_dtype)).view(self.stored)
        if self._is_plain:
            return PlainLinear(weight, self.bias, self.choice.min_rows)
        turned = weight.T if self.transposed else weight
        return make_linear(self.choice, [turned], self.biases, self.device)


class StreamedLinear:
    """A product whose weights are in one of the buffers of `stream` while its layer computes."""

    weights_stay = False

    def __init__(
        self,
        stream: LayerStream,
        layer: int,
        begin: int,
        size_bytes: int,
        shape: tuple[int, int],
        make: Callable[[Tensor], Linear],
        *,
        is_ready: bool,
        is_native: bool,
    ) -> None:
        """Take where the weights begin in a buffer, and what makes a product of these bytes.

        With `is_ready` it multiplies with these very bytes; else it packs them, whenever they have
        been read, and the product goes with its layer.
        """
        self._stream = stream
        self._layer = layer
        self._begin = begin
        self._size_bytes = size_bytes
        self._shape = shape
        self._make = make
        self._is_ready = is_ready
        self._is_native = is_native
        self._by_buffer: dict[int, Linear] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    @property
    def is_native(self) -> bool:
        """Whether the compiled library multiplies."""
        return self._is_native

    def native_product(self) -> NativeProduct:
        """Return what multiplies with the weights that are there now."""
        product = self._at_hand()
        assert isinstance(product, NativeSource), "is_native says so"
        return product.native_product()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._at_hand()(rows)

    def _at_hand(self) -> Linear:
        """Return the product of the weights that have been read for the layer at work."""
        buffer = self._stream.buffer_of(self._layer)
        made, key = self._stream.made, self._begin
        if self._is_ready:
            made, key = self._by_buffer, buffer
        if key not in made:
            made[key] = self._make(self._stream.weights(self._begin, self._size_bytes, buffer))
        return made[key]
