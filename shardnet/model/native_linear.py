"""Products with bfloat16 weights by the compiled library: how they are packed, and the product.

Knows the layout, which csrc/quantized.c reads too. Must not know models.

Packed weights are bfloat16 [panels, pairs of inputs, 16 outputs, 2]: what fills up is zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.native import NativeKernels, NativeProduct
from shardnet.model.quantization import PANEL


class NativeLinear:
    """A product with packed bfloat16 weights: [T, K] rows in, [T, N] out, in the rows' dtype.

    Rows in float32 lose nothing: a weight of bfloat16 is one of float32. A row's bits do not depend
    on the rows beside it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, native: NativeKernels) -> None:
        """Pack [N, K] weights. Raises ValueError for some that are not bfloat16."""
        if weight.dtype is not torch.bfloat16:
            raise ValueError(f"weights are {weight.dtype}, not bfloat16")
        self._shape = (weight.shape[0], weight.shape[1])
        wide_bias = bias.float() if bias is not None else None  # [N]
        self._product = native.product(_pack(weight), wide_bias, self._shape, bits=16)

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


def _pack(weight: Tensor) -> Tensor:
    n_out, n_in = weight.shape
    panels, pairs = -(-n_out // PANEL), -(-n_in // 2)
    if n_out % PANEL or n_in % 2:
        weight = F.pad(weight, (0, 2 * pairs - n_in, 0, panels * PANEL - n_out))
    rows = weight.reshape(panels, PANEL, 2 * pairs).contiguous()
    if rows.storage_offset() % 2:
        rows = rows.clone()
    together = rows.view(torch.int32)  # [panels, PANEL, pairs]: copied in one piece each
    return together.transpose(1, 2).contiguous().view(torch.bfloat16)
