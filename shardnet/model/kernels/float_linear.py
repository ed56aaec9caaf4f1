"""Linear layers with weights that stay floats, by the compiled library, and how they are packed.

Knows the layout, which csrc/pack.c writes and csrc/linear.c reads. Must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PANEL, PanelForm
from shardnet.model.kernels.library import NativeKernels
from shardnet.model.kernels.packing import FLOAT_FORMS, pack_natively
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels


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
