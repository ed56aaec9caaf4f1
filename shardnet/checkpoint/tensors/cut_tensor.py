"""Some rows, or columns, of a parameter in the place of all of it, for a shard of a stage.

Knows how a model tensor is read. Must not know which rows a shard has, nor formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor, as_stored
from shardnet.model.kernels.codes import Codes
from shardnet.model.kernels.stored_rows import GgufRows, PackedWeight, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Range = tuple[int, int]
"""Begin and end."""


def cut_tensor(tensor: ModelTensor, ranges: Sequence[Range], axis: int = 0) -> ModelTensor:
    """Describe what a parameter has in `ranges` of its `axis`, one behind the other.

    Of one that is stored without any conversion only these rows are read.
    """
    n_kept = sum(end - begin for begin, end in ranges)
    shape = tuple(n_kept if at == axis else n for at, n in enumerate(tensor.shape))
    is_stored = tensor.make is as_stored and tensor.sources[0].strides is None
    if axis == 0 and is_stored:
        (source,) = tensor.sources
        sources = tuple(source.rows(begin, end) for begin, end in ranges)
        make = as_stored if len(sources) == 1 else _join
        return replace(tensor, shape=shape, sources=sources, make=make)
    packed = None if tensor.packed is None else _cut_packed(tensor.packed, ranges)
    return replace(tensor, shape=shape, make=_cut_make(tensor.make, ranges, axis), packed=packed)


def _join(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    import torch

    return torch.cat(list(stored))


def _cut_make(make: Make, ranges: Sequence[Range], axis: int) -> Make:
    def cut(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        whole = make(stored, dtype)
        return torch.cat([whole.narrow(axis, begin, end - begin) for begin, end in ranges], axis)

    return cut


def _cut_packed(packed: PackedWeight, ranges: Sequence[Range]) -> PackedWeight:
    def rows(stored: Sequence[Tensor], begin: int, end: int) -> StoredRows:
        parts = []
        for start, stop in ranges:
            first, last = max(begin, 0), min(end, stop - start)
            if first < last:
                parts.append(packed.rows(stored, start + first, start + last))
            begin, end = begin - (stop - start), end - (stop - start)
        return _joined(parts)

    return replace(packed, rows=rows, in_order=False, is_cut=True)


def _joined(parts: Sequence[StoredRows]) -> StoredRows:
    """Join rows that are stored alike."""
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, GgufRows):
        rows = [part.rows for part in parts if isinstance(part, GgufRows)]
        return replace(first, rows=torch.cat(rows))
    codes = [part for part in parts if isinstance(part, Codes)]
    return Codes.join(codes)
