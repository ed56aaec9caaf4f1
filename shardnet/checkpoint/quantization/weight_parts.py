"""What one quantised weight is made of: stored tensors, checked by their headers, as codes.

Knows dtypes, shapes, and which forms panels can have. Must not know who stores weights so. Imports
torch only when values are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor, damaged
from shardnet.errors import CheckpointError
from shardnet.model.config.panel_form import UNIT, Code, PanelForm, Scale
from shardnet.model.families.tensor_shapes import Shape
from shardnet.model.kernels.codes import Codes, PackedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATS: Final = ("F32", "F16", "BF16")


ReadRows = Callable[[Sequence["Tensor"], int, int], Codes]
"""Maps stored tensors to the codes of the rows [begin, end); begin is a multiple of 16."""
InputOrder = Callable[[Sequence["Tensor"]], "Tensor | None"]
RowOrder = Callable[[int, int], "Tensor"]
"""Maps a range of a parameter's rows to the numbers of the stored rows, int64."""
FLOAT_SCALES: Final = {"F16": Scale.FLOAT16, "BF16": Scale.BFLOAT16, "F32": Scale.FLOAT32}
"""By safetensors' name of a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """The parts of one weight, by suffix.

    `stem` begins their names in the checkpoint at `where`. They make the parameter `name`, of
    `shape` (N, K) in the model.
    """

    stem: str
    name: str
    shape: tuple[int, int]
    parts: Mapping[str, StoredTensor]
    where: str

    def part(self, suffix: str, dtypes: Sequence[str], *shapes: Shape) -> StoredTensor:
        """Return a part; raise CheckpointError unless it has one of these dtypes and shapes."""
        info = self.parts.get(suffix)
        if info is None:
            raise damaged(f"{self.where}: tensor {self.stem}{suffix} is missing")
        if info.dtype not in dtypes or info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise damaged(
                f"{self.where}/{info.file}: tensor {info.name} is {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {expected}"
            )
        return info

    def damaged(self, suffix: str, problem: str) -> CheckpointError:
        """Make the error for a part whose content has a `problem`."""
        info = self.parts[suffix]
        return damaged(f"{self.where}/{info.file}: tensor {info.name} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How one maker stores quantised weights.

    The name of one part of each such weight ends with one of `markers`, those of all its parts with
    one of `suffixes`; `combine` makes the parameter. A `.bias` counts as a part only where the
    model has no such parameter. Names that end with one of `skipped` are about activations or
    the KV cache, which are not quantised here. `title` names the format for people.
    """

    markers: tuple[str, ...]
    suffixes: tuple[str, ...]
    combine: Callable[[WeightParts], ModelTensor]
    skipped: tuple[str, ...] = ()
    title: str = ""


def whole_row(n_inputs: int) -> int:
    """Return the size of a group of all inputs, padded as panels are."""
    return -(-n_inputs // UNIT) * UNIT


def group_of(size: int, n_inputs: int) -> int:
    """Return the inputs of a group where `size` share a scale, or with 0 all of a row."""
    return size if 0 < size < n_inputs else whole_row(n_inputs)


def _without_nan(rows: ReadRows, source: StoredTensor) -> ReadRows:
    """Refuse E4M3 codes 0x7f and 0xff: some instruction sets read them as 480, some as NaN."""

    def checked(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        import torch

        read = rows(stored, begin, end)
        unsigned, signed = read.codes, read.codes.view(torch.int8)
        if begin < end and (int(unsigned.max()) == 0xFF or int(signed.max()) == 0x7F):
            raise damaged(f"{source.file}: tensor {source.name} has weights that are NaN")
        return read

    return checked


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

    Where panels cannot have the form's groups it is left as values. Whoever reads E4M3 codes that
    are NaN gets a CheckpointError.
    """
    if form.code is Code.E4M3:
        rows = _without_nan(rows, sources[0])

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
