"""The stored tensors that one quantised weight is made of, checked by their headers.

Knows dtypes and shapes. Must not know who stores weights so. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import AGAIN, StoredTensor
from shardnet.errors import CheckpointError
from shardnet.model.families.tensor_shapes import Shape

FLOATS: Final = ("F32", "F16", "BF16")


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
            raise CheckpointError(
                f"{self.where}: tensor {self.stem}{suffix} is missing", remedy=AGAIN
            )
        if info.dtype not in dtypes or info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self.where}/{info.file}: tensor {info.name} is {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {expected}",
                remedy=AGAIN,
            )
        return info

    def damaged(self, suffix: str, problem: str) -> CheckpointError:
        """Make the error for a part whose content has a `problem`."""
        info = self.parts[suffix]
        return CheckpointError(
            f"{self.where}/{info.file}: tensor {info.name} {problem}", remedy=AGAIN
        )


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
