"""Model tensors: parameters of a family's table, each made of stored tensors, or cut for a shard.

Knows the pure conversions from stored values to a parameter that all formats share, and how rows or
columns are cut out of one. Must not know files, the layout of a format, nor what a shard has.
Imports torch only when a tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.kernels.codes import Codes, GgufRows, PackedWeight, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[Sequence["Tensor"], "torch.dtype"], "Tensor"]
"""Maps the stored tensors, which it must not change, to the parameter.

Computed values are in the given dtype; others may have their own.
"""


Range = tuple[int, int]
"""Begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter under the name and with the shape of the family's table.

    `dtype` is safetensors' name of the dtype it is stored in, None if its values are computed.
    `packed` says how a quantised matrix becomes panels, which are computed with as it is stored;
    None for what has to be plain.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    sources: tuple[StoredTensor, ...]
    make: Make
    packed: PackedWeight | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its stored tensors."""
        return sum(source.size_bytes for source in self.sources)

    @property
    def row_sources(self) -> tuple[StoredTensor, ...]:
        """Those of its stored tensors that have a row for each of its own."""
        return tuple(source for source in self.sources if source.shape[:1] == self.shape[:1])

    @property
    def is_stored_matrix(self) -> bool:
        """Whether it is one contiguous matrix in one file, without any conversion."""
        if self.make is not as_stored or len(self.sources) != 1 or len(self.shape) != 2:
            return False
        return self.sources[0].strides is None

    @property
    def is_stored_blocks(self) -> bool:
        """Whether it is one matrix in one file, whose rows are packed each for itself, in order."""
        is_one = len(self.sources) == 1 and self.sources[0].shape == self.shape
        return is_one and self.packed is not None and self.packed.in_order


def as_stored(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the one stored tensor as the parameter."""
    return stored[0]


def rotary_halves(rows: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of queries or keys from interleaved rotary order to Hugging Face's.

    Meta's checkpoints, Mistral's, and llama-type GGUF have the two rows that rotate together side
    by side in each head; Hugging Face has the first ones of all pairs, then the second ones.
    `rows` is [heads * D, ...], in any type; returns a copy.
    """
    size = rows.shape[0] // n_heads
    pairs = rows.view(n_heads, size // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def unchanged(name: str, source: StoredTensor) -> ModelTensor:
    """Describe a parameter that is stored without any conversion."""
    return ModelTensor(
        name=name, shape=source.shape, dtype=source.dtype, sources=(source,), make=as_stored
    )


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


def divide(tensor: ModelTensor, n_groups: int) -> dict[str, ModelTensor]:
    """Describe a linear whose groups of outputs have their own inputs as one for each: NAME.0.

    One that has no such groups stays: the loader refuses its name.
    """
    if not tensor.shape or tensor.shape[0] % n_groups:
        return {tensor.name: tensor}
    n, base = tensor.shape[0] // n_groups, tensor.name.removesuffix(".weight")
    cuts = {f"{base}.{at}.weight": [(at * n, (at + 1) * n)] for at in range(n_groups)}
    return {name: replace(cut_tensor(tensor, own), name=name) for name, own in cuts.items()}


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
