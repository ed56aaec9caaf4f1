"""Model tensors of codes, scales and minimums: packed into panels, or computed as plain values.

Knows which forms panels can have. Must not know who stores weights so. Imports torch only when
values are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.panel_form import UNIT, PanelForm, Scale
from shardnet.model.kernels.codes import Codes
from shardnet.model.kernels.stored_rows import PackedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ReadRows = Callable[[Sequence["Tensor"], int, int], Codes]
"""Maps stored tensors to the codes of the rows [begin, end); begin is a multiple of 16."""
InputOrder = Callable[[Sequence["Tensor"]], "Tensor | None"]
RowOrder = Callable[[int, int], "Tensor"]
"""Maps a range of a parameter's rows to the numbers of the stored rows, int64."""

FLOAT_SCALES: Final = {"F16": Scale.FLOAT16, "BF16": Scale.BFLOAT16, "F32": Scale.FLOAT32}
"""By safetensors' name of a dtype."""


def whole_row(n_inputs: int) -> int:
    """Return the size of a group of all inputs, padded as panels are."""
    return -(-n_inputs // UNIT) * UNIT


def group_of(size: int, n_inputs: int) -> int:
    """Return the inputs of a group where `size` share a scale, or with 0 all of a row."""
    return size if 0 < size < n_inputs else whole_row(n_inputs)


def coded_tensor(
    name: str,
    shape: tuple[int, int],
    sources: Sequence[StoredTensor],
    *,
    form: PanelForm,
    rows: ReadRows,
    input_order: InputOrder | None = None,
) -> ModelTensor:
    """Describe the parameter `name` of `shape` (N, K), whose `rows` are codes of `form`.

    Where panels cannot have the form's groups it is left as values.
    """

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        from shardnet.checkpoint.quantization.packed_codes import all_values

        order = None if input_order is None else input_order(stored)
        return all_values(lambda begin, end: rows(stored, begin, end), shape, form, order, dtype)

    packed = PackedWeight(form=form, rows=rows, input_order=input_order)
    return ModelTensor(
        name=name,
        shape=shape,
        dtype=None,
        sources=tuple(sources),
        make=make,
        packed=packed if form.has_kernel else None,
    )
