"""Model tensors: what a family's table asks for, each made of one or several stored tensors.

Knows the pure steps from stored values to a parameter that all formats share. Must not know files,
nor where a format keeps what. Imports torch only when a tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.model.stored import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[Sequence["Tensor"], "torch.dtype"], "Tensor"]
"""From the stored tensors, which it must not change, to the parameter.

Values that have to be computed come rounded to the given dtype; others may keep their own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter under the name and with the shape of the family's table.

    `dtype` is safetensors' name of what its values are stored in, None where they are computed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    sources: tuple[StoredTensor, ...]
    make: Make

    @property
    def size_bytes(self) -> int:
        """Stored bytes that making it reads."""
        return sum(source.size_bytes for source in self.sources)


def as_stored(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The one stored tensor is the parameter."""
    return stored[0]


def unchanged(name: str, source: StoredTensor) -> ModelTensor:
    """Name the parameter that is stored as it is."""
    return ModelTensor(
        name=name, shape=source.shape, dtype=source.dtype, sources=(source,), make=as_stored
    )
