"""Products with bfloat16 weights by the compiled library: where they are packed, and the product.

Knows the layout, which csrc/pack.c writes and csrc/products.c reads. Must not know models.

Packed weights are bfloat16 [panels, pairs of inputs, 16 outputs, 2]: what fills up is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardnet.model.native import NativeKernels, NativeProduct
from shardnet.model.native_packing import pack_natively
from shardnet.model.quantization import PANEL


class NativeLinear:
    """A product with packed bfloat16 weights: [T, K] rows in, [T, N] out, in the rows' dtype.

    Rows in float32 lose nothing: a weight of bfloat16 is one of float32. A row's bits do not depend
    on the rows beside it.
    """

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, native: NativeKernels
    ) -> None:
        """Join and pack [N_i, K] weights. Raises ValueError for some that are not bfloat16."""
        for weight in weights:
            if weight.dtype is not torch.bfloat16:
                raise ValueError(f"weights are {weight.dtype}, not bfloat16")
        self._shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        wide_bias = bias.float() if bias is not None else None  # [N]
        self._product = native.product(_pack(weights, native), wide_bias, self._shape, bits=16)

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


def _pack(weights: Sequence[Tensor], native: NativeKernels) -> Tensor:
    if any(weight.shape[0] % PANEL for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]  # else a panel would be half empty
    n_panels = [-(-weight.shape[0] // PANEL) for weight in weights]
    pairs = -(-weights[0].shape[1] // 2)
    packed = torch.empty(sum(n_panels), pairs, PANEL, 2, dtype=torch.bfloat16)
    for weight, panels in zip(weights, torch.split(packed, n_panels), strict=True):
        pack_natively(native, weight, panels, bits=16)
    return packed
