"""A LoRA adapter as its files store it, whichever format they have.

Knows which linears of a model may have one, and what is checked of every adapter. Must not know how
a format spells names and settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.formats.gguf_types import PLAIN, unpack
from shardnet.checkpoint.tensors.model_tensor import rotary_halves
from shardnet.checkpoint.tensors.stored_tensor import FileState, StoredTensor, read_stored
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.stage_tensors import layer_tensors

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANK: Final = 512
MAX_ADAPTER_BYTES: Final = 4 << 30
"""Cap on what all matrices of one adapter take in float32."""
MAX_FACTOR: Final = 1e4

ADAPTED: Final = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("self_attn.qkv_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
)
"""The linears of a layer that an adapter may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to the outputs of a linear [N, K]: `factor` times B(A x)."""

    a: Tensor  # [R, K]
    b: Tensor  # [N, R]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPair:
    """The two matrices of one linear in a file, A [R, K] and B [N, R].

    With `n_heads` the rows of B are in interleaved rotary order (`rotary_halves`).
    """

    a: StoredTensor
    b: StoredTensor
    factor: float
    n_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter whose matrices lie in one file: `pairs` by absolute layer and by linear."""

    path: Path
    opened: FileState
    pairs: Mapping[int, Mapping[str, StoredPair]]

    def read(self, layer: int) -> dict[str, LowRank]:
        """Read what the adapter adds to the linears of a layer, in its stored float dtypes.

        Raises CheckpointError if the file has changed or cannot be read.
        """
        return {name: self._read_pair(pair) for name, pair in self.pairs.get(layer, {}).items()}

    def _read_pair(self, pair: StoredPair) -> LowRank:
        b = self._read_tensor(pair.b)
        if pair.n_heads is not None:
            b = rotary_halves(b, pair.n_heads)
        return LowRank(a=self._read_tensor(pair.a), b=b, factor=pair.factor)

    def _read_tensor(self, info: StoredTensor) -> Tensor:
        import torch

        values = read_stored(self.path.parent, info, self.opened)
        if info.dtype in PLAIN:
            return values
        return unpack(values, info.dtype, info.shape, torch.float32)


def linear_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shapes [N, K] of the linears of a layer that an adapter may change."""
    tensors = layer_tensors(config, layer)
    prefix = f"model.layers.{layer}."
    shapes = {name: tensors.get(f"{prefix}{name}.weight", ()) for name in ADAPTED}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def check_pairs(
    where: Path, config: ModelConfig, pairs: Mapping[int, Mapping[str, StoredPair]]
) -> None:
    """Check an adapter's matrices against the model that it is to be used with.

    Raises CheckpointError, which names the tensor, for ranks, factors and shapes that are not
    those of the model, and for an adapter that changes nothing or is too large.
    """
    n_weights = 0
    for layer, name, pair in _every(pairs):
        if layer >= config.n_layers:
            raise CheckpointError(
                f"{where}: {pair.a.name} is of layer {layer}, and the model has {config.n_layers}",
                remedy="use the adapter with the model that it was trained for",
            )
        _check_pair(where, pair, linear_shapes(config, layer).get(name))
        n_weights += math.prod(pair.a.shape) + math.prod(pair.b.shape)
    if not n_weights:
        raise CheckpointError(f"{where}: the adapter has no matrices", remedy="fetch it again")
    if 4 * n_weights > MAX_ADAPTER_BYTES:
        raise CheckpointError(
            f"{where}: its matrices take {4 * n_weights} bytes, at most {MAX_ADAPTER_BYTES} are "
            "loaded",
            remedy="use an adapter of a lower rank, or merge it into the model",
        )


def _every(
    pairs: Mapping[int, Mapping[str, StoredPair]],
) -> Iterator[tuple[int, str, StoredPair]]:
    for layer, linears in pairs.items():
        for name, pair in linears.items():
            yield layer, name, pair


def _check_pair(where: Path, pair: StoredPair, linear: tuple[int, int] | None) -> None:
    if linear is None:
        raise unsupported(where, f"{pair.a.name} is for a linear that the model does not have")
    a, b = pair.a.shape, pair.b.shape
    is_fitting = len(a) == len(b) == 2 and a[0] == b[1] and (b[0], a[1]) == linear
    if not is_fitting:
        raise CheckpointError(
            f"{where}: {pair.a.name} {list(a)} and {pair.b.name} {list(b)} do not fit the model's "
            f"linear {list(linear)}",
            remedy="use the adapter with the model that it was trained for",
        )
    if not 1 <= a[0] <= MAX_RANK:
        raise unsupported(where, f"{pair.a.name} has rank {a[0]}, at most {MAX_RANK} are loaded")
    if not abs(pair.factor) <= MAX_FACTOR:
        raise unsupported(where, f"{pair.a.name} is scaled by {pair.factor:g}")


def unsupported(where: Path, what: str) -> UnsupportedModelError:
    """Return the error of an adapter with something that is not implemented."""
    return UnsupportedModelError(
        f"{where}: {what}", remedy="merge the adapter into the model, and use that instead"
    )
