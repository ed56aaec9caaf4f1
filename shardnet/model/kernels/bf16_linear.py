"""Linear layers with bfloat16 weights by the compiled library, and how their weights are packed.

Knows the layout, which csrc/pack.c writes and csrc/linear.c reads. Must not know models.

Packed weights are bfloat16 [panels, pairs of inputs, 16 outputs, 2], padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.quantization import PANEL
from shardnet.model.kernels.library import NativeKernels, NativeMatmul, packed_bytes
from shardnet.model.kernels.packing import pack_natively


class Bf16Linear:
    """A linear layer with packed bfloat16 weights: rows [T, K] to [T, N], in the rows' dtype.

    float32 rows lose no precision: every bfloat16 weight is exact in float32. It is
    batch-invariant.
    """

    weights_stay = True
    is_native = True

    def __init__(
        self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, native: NativeKernels
    ) -> None:
        """Take packed weights of `shape` (N, K)."""
        self._shape = shape
        wide_bias = bias.float() if bias is not None else None  # [N]
        self._matmul = native.matmul(packed, wide_bias, shape, bits=16)

    @classmethod
    def pack(
        cls, weights: Sequence[Tensor], bias: Tensor | None, native: NativeKernels
    ) -> Bf16Linear:
        """Join and pack weights [N_i, K]. Raises ValueError unless all are bfloat16."""
        for weight in weights:
            if weight.dtype is not torch.bfloat16:
                raise ValueError(f"weights are {weight.dtype}, not bfloat16")
        shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        return cls(_pack(weights, native), shape, bias, native)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul."""
        return self._matmul

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._matmul(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPacking:
    """Packs bfloat16 rows of `n_in` weights, as bytes, on the calling thread.

    It implements `Packing` of streaming/layer_stream.py.
    """

    native: NativeKernels
    n_in: int

    @property
    def unit_bytes(self) -> int:
        """Stored bytes of the rows of one panel."""
        return PANEL * self._row_bytes

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` of rows."""
        return packed_bytes((size_bytes // self._row_bytes, self.n_in), bits=16)

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack the rows in `stored`, uint8, into `packed`, uint8."""
        rows = stored.view(torch.bfloat16).view(-1, self.n_in)
        pack_natively(self.native, rows, packed, bits=16, n_threads=1)

    @property
    def _row_bytes(self) -> int:
        return self.n_in * torch.bfloat16.itemsize


def fills_panels(n_outs: Sequence[int]) -> bool:
    """Say whether concatenated weights of `n_outs` outputs each start on panel boundaries."""
    return not any(n_out % PANEL for n_out in n_outs[:-1])


def _pack(weights: Sequence[Tensor], native: NativeKernels) -> Tensor:
    if not fills_panels([weight.shape[0] for weight in weights]):
        weights = [torch.cat(list(weights))]  # else a panel would be partly empty
    n_panels = [-(-weight.shape[0] // PANEL) for weight in weights]
    pairs = -(-weights[0].shape[1] // 2)
    packed = torch.empty(sum(n_panels), pairs, PANEL, 2, dtype=torch.bfloat16)
    for weight, panels in zip(weights, torch.split(packed, n_panels), strict=True):
        pack_natively(native, weight, panels, bits=16)
    return packed
