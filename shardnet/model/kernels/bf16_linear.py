"""Products with bfloat16 weights by the compiled library: where they are packed, and the product.

Knows the layout, which csrc/pack.c writes and csrc/products.c reads. Must not know models.

Packed weights are bfloat16 [panels, pairs of inputs, 16 outputs, 2]: what fills up is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.quantization import PANEL
from shardnet.model.kernels.library import NativeKernels, NativeProduct, packed_bytes
from shardnet.model.kernels.packing import pack_natively


class NativeLinear:
    """A product with packed bfloat16 weights: [T, K] rows in, [T, N] out, in the rows' dtype.

    Rows in float32 lose nothing: a weight of bfloat16 is one of float32. A row's bits do not depend
    on the rows beside it.
    """

    weights_stay = True

    def __init__(
        self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, native: NativeKernels
    ) -> None:
        """Take weights of `shape` (N, K) that are packed."""
        self._shape = shape
        wide_bias = bias.float() if bias is not None else None  # [N]
        self._product = native.product(packed, wide_bias, shape, bits=16)

    @classmethod
    def pack(
        cls, weights: Sequence[Tensor], bias: Tensor | None, native: NativeKernels
    ) -> NativeLinear:
        """Join and pack [N_i, K] weights. Raises ValueError for some that are not bfloat16."""
        for weight in weights:
            if weight.dtype is not torch.bfloat16:
                raise ValueError(f"weights are {weight.dtype}, not bfloat16")
        shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        return cls(_pack(weights, native), shape, bias, native)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    @property
    def is_native(self) -> bool:
        """True."""
        return True

    def native_product(self) -> NativeProduct:
        """Return the product in the compiled library."""
        return self._product

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._product(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPacking:
    """Packs rows of `n_in` weights a few panels at a time, as bytes, on the calling thread alone.

    It is a `Packing` of streaming/layer_stream.py.
    """

    native: NativeKernels
    n_in: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of the rows of a panel, before they are packed."""
        return PANEL * self._row_bytes

    def packed_bytes(self, size_bytes: int) -> int:
        """Return what so many bytes of rows take when they are packed."""
        return packed_bytes((size_bytes // self._row_bytes, self.n_in), bits=16)

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack rows, uint8, to where their panels belong."""
        rows = stored.view(torch.bfloat16).view(-1, self.n_in)
        pack_natively(self.native, rows, packed, bits=16, n_threads=1)

    @property
    def _row_bytes(self) -> int:
        return self.n_in * torch.bfloat16.itemsize


def fills_panels(n_outs: Sequence[int]) -> bool:
    """Whether weights of so many outputs, one behind the other, leave no panel half empty."""
    return not any(n_out % PANEL for n_out in n_outs[:-1])


def _pack(weights: Sequence[Tensor], native: NativeKernels) -> Tensor:
    if not fills_panels([weight.shape[0] for weight in weights]):
        weights = [torch.cat(list(weights))]  # else a panel would be half empty
    n_panels = [-(-weight.shape[0] // PANEL) for weight in weights]
    pairs = -(-weights[0].shape[1] // 2)
    packed = torch.empty(sum(n_panels), pairs, PANEL, 2, dtype=torch.bfloat16)
    for weight, panels in zip(weights, torch.split(packed, n_panels), strict=True):
        pack_natively(native, weight, panels, bits=16)
    return packed
