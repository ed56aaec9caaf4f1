"""How much of a checkpoint stays packed as it is stored, and the bytes of its panels.

Knows headers. Must not know torch: the planner calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import ITEM_BYTES
from shardnet.model.config.panel_form import PANEL, Quantization
from shardnet.model.families.stage_tensors import (
    embedding_tensors,
    head_tensors,
    is_quantizable,
    layer_tensors,
    mtp_tensors,
)
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCount:
    """Packed weights: how many there are, and the bytes of their panels."""

    n_weights: int = 0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSizes:
    """The weights of a checkpoint that stay packed as they are stored.

    Those of each layer, what predicts further tokens behind the last one, and of them those of
    experts; those of embedding and head. With `is_tied`
    the head is the embedding's table. `can_stream`: all of those in layers can be packed while they
    are read. `is_all`: no other linear of a layer has weights.
    """

    layers: tuple[PackedCount, ...]
    experts: tuple[PackedCount, ...]
    embedding: PackedCount
    head: PackedCount
    is_tied: bool
    can_stream: bool
    is_all: bool

    @property
    def nearest(self) -> Quantization | None:
        """The quantisation whose weights take about as many bytes in layers, None for 16 bits."""
        n_weights = sum(count.n_weights for count in self.layers)
        bits = 8 * sum(count.n_bytes for count in self.layers) / max(1, n_weights)
        kinds: list[Quantization | None] = [*Quantization, None]
        return min(kinds, key=lambda kind: abs(bits - (16 if kind is None else kind.bits)))


def packed_sizes(checkpoint: Checkpoint) -> PackedSizes | None:
    """Count what stays packed, if nothing is quantised again; None if nothing does."""
    config = checkpoint.config
    if all(tensor.packed is None for tensor in checkpoint.tensors.values()):
        return None
    layers = [layer_tensors(config, layer) for layer in range(config.n_layers)]
    own = [_linears(checkpoint, tensors) for tensors in layers]
    linears = [*own, _linears(checkpoint, mtp_tensors(config))] if checkpoint.has_mtp else own
    embedding, head = embedding_tensors(config), head_tensors(config)
    return PackedSizes(
        layers=tuple(_count(tensors) for tensors in linears),
        experts=tuple(
            _count(tensor for tensor in tensors if ".experts." in tensor.name)
            for tensors in linears
        ),
        embedding=_count(_linears(checkpoint, embedding)),
        head=_count(_linears(checkpoint, head)),
        is_tied=bool(embedding.keys() & head.keys()),
        can_stream=all(packs_by_rows(tensor) for tensors in own for tensor in tensors),
        is_all=all(tensor.packed is not None for tensors in own for tensor in tensors),
    )


def _linears(checkpoint: Checkpoint, tensors: Table) -> list[ModelTensor]:
    names = [name for name, shape in tensors.items() if is_quantizable(name, shape)]
    return [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]


def _count(tensors: Iterable[ModelTensor]) -> PackedCount:
    n_weights = n_bytes = 0
    for tensor in tensors:
        if tensor.packed is not None:
            n_out, n_in = tensor.shape
            n_weights += n_out * n_in
            n_bytes += tensor.packed.form.packed_bytes(n_out, n_in)
    return PackedCount(n_weights=n_weights, n_bytes=n_bytes)


def packs_by_rows(tensor: ModelTensor) -> bool:
    """Say whether rows of blocks can be packed while they are read, one stored tensor at a time."""
    packed, sources = tensor.packed, tensor.sources
    if packed is None:
        return True
    if (
        packed.is_cut
        or packed.input_order is not None
        or any(source.dtype in ITEM_BYTES for source in sources)
    ):
        return False
    fills = all(source.shape[0] % PANEL == 0 for source in sources[:-1])
    return len(sources) == 1 or (packed.in_order and fills)
