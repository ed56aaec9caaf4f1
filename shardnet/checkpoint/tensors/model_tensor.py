"""Model tensors: the parameters of a family's table, each made of one or several stored tensors.

Knows the pure conversions from stored values to a parameter that all formats share. Must not know
files, nor the layout of a format. Imports torch only when a tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.kernels.stored_rows import PackedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[Sequence["Tensor"], "torch.dtype"], "Tensor"]
"""Maps the stored tensors, which it must not change, to the parameter.

Computed values are in the given dtype; others may have their own.
"""


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
    def is_stored_matrix(self) -> bool:
        """Whether it is one contiguous matrix in one file, without any conversion."""
        if self.make is not as_stored or len(self.sources) != 1 or len(self.shape) != 2:
            return False
        return self.sources[0].strides is None


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
