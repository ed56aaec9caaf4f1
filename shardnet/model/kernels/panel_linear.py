"""Linear layers with packed weights in any form.

Knows when the compiled library multiplies and when torch does. Must not know layouts
(kernels/panels.py) nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import UNPACKED_PANELS
from shardnet.model.kernels.library import NativeKernels, NativeMatmul, native_kernels
from shardnet.model.kernels.panels import Panels, unpack


class PanelLinear:
    """A linear layer with packed weights: rows [T, K] to [T, N], in the rows' dtype.

    Its parts stand one after the other in the outputs, each in a form of its own. The compiled
    library quantises rows to int8 per group, unless the form's codes are floats, and is
    batch-invariant. torch unpacks the weights a few panels at a time, and is not.
    """

    weights_stay = True

    def __init__(
        self, parts: Sequence[Panels], bias: Tensor | None, native: NativeKernels | None = None
    ) -> None:
        """Join `parts` [N_i, K] with their `bias` [N], any float dtype, on their device.

        `native` replaces this machine's library. Raises ValueError for parts with different numbers
        of inputs.
        """
        n_in = parts[0].shape[1]
        self.parts = tuple(parts)
        """The packed weights, in the order of the outputs."""
        self.shape = (sum(part.shape[0] for part in parts), n_in)
        """(N, K)."""
        self.bias = bias.float() if bias is not None else None  # [N]
        """[N], float32."""
        if parts[0].packed.device.type == "cpu":
            native = native or native_kernels()
        self._native: NativeMatmul | None = None
        if native is not None:
            self._native = native.matmul(self.parts, self.bias)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The packed weights, and the bias."""
        packed = tuple(part.packed for part in self.parts)
        return packed if self.bias is None else (*packed, self.bias)

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it; else torch does."""
        return self._native is not None

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul."""
        assert self._native is not None, "is_native says so"
        return self._native

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._multiply(rows) if self._native is None else self._native(rows)

    def _multiply(self, rows: Tensor) -> Tensor:
        outputs = [_multiply(rows, part) for part in self.parts]
        result = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        return result if self.bias is None else (result + self.bias).to(rows.dtype)


def _multiply(rows: Tensor, part: Panels) -> Tensor:
    if part.input_order is not None:
        rows = rows.index_select(1, part.input_order)
    outputs = [F.linear(rows, unpack(some, rows.dtype)) for some in part.split(UNPACKED_PANELS)]
    return torch.cat(outputs, dim=-1)
