"""Linear layers with packed weights in any form, and how floats are packed for the library.

Knows when the compiled library multiplies and when torch does. Must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import PANEL, UNPACKED_PANELS, PanelForm
from shardnet.model.kernels.library import NativeKernels, NativeMatmul, native_kernels
from shardnet.model.kernels.packing import FLOAT_FORMS, pack_natively
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


def float_linear(
    weights: Sequence[Tensor], bias: Tensor | None, native: NativeKernels
) -> PanelLinear:
    """Join and pack weights [N_i, K]. Raises ValueError unless all are of one dtype of FLOAT_FORMS.

    float32 rows lose no precision: every such weight is exact in float32.
    """
    return PanelLinear([pack_floats(weights, native)], bias, native)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPacking:
    """Packs rows of `n_in` floats, as bytes, to a form, on the calling thread.

    It implements `Packing` of streaming/buffers.py.
    """

    native: NativeKernels
    n_in: int
    dtype: torch.dtype
    form: PanelForm
    """That of FLOAT_FORMS for the dtype, or one that rows are quantised to."""

    @property
    def unit_bytes(self) -> int:
        """Stored bytes of the rows of one panel."""
        return PANEL * self._row_bytes

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` of rows."""
        return self.form.packed_bytes(size_bytes // self._row_bytes, self.n_in)

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack the rows in `stored`, uint8, into `packed`, uint8."""
        rows = stored.view(self.dtype).view(-1, self.n_in)
        pack_natively(self.native, rows, packed, self.form, n_threads=1)

    @property
    def _row_bytes(self) -> int:
        return self.n_in * self.dtype.itemsize


def fills_panels(n_outs: Sequence[int]) -> bool:
    """Say whether concatenated weights of `n_outs` outputs each start on panel boundaries."""
    return not any(n_out % PANEL for n_out in n_outs[:-1])


def pack_floats(weights: Sequence[Tensor], native: NativeKernels) -> Panels:
    """Join and pack weights [N_i, K]. Raises ValueError unless all are of one of these dtypes."""
    dtype = weights[0].dtype
    if dtype not in FLOAT_FORMS or any(weight.dtype is not dtype for weight in weights):
        names = ", ".join(sorted({str(weight.dtype) for weight in weights}))
        raise ValueError(f"weights are {names}, not all of one float dtype")
    shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
    if not fills_panels([weight.shape[0] for weight in weights]):
        weights = [torch.cat(list(weights))]  # else a panel would be partly empty
    form = FLOAT_FORMS[dtype]
    packed = torch.empty(form.packed_shape(*shape), dtype=torch.uint8)
    n_panels = [-(-weight.shape[0] // PANEL) for weight in weights]
    for weight, panels in zip(weights, torch.split(packed, n_panels), strict=True):
        pack_natively(native, weight, panels, form)
    return Panels(packed=packed, form=form, shape=shape)
