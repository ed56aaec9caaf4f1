"""The dtype in which a checkpoint stores linear weights, and whether a kernel computes with it.

Knows headers. Must not know torch: the planner calls it. Only such layers can be streamed
(streaming/layer_stream.py) without quantisation; others would have to be converted at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import head_tensors, is_quantizable, layer_tensors
from shardnet.model.families.tensor_shapes import Table
from shardnet.stage.estimate.memory_estimate import WeightForm
from shardnet.stage.estimate.packed_sizes import PackedSizes, packed_sizes
from shardnet.types import DType

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint
    from shardnet.model.kernels.linear import KernelChoice

STORED_FLOATS: Final[Mapping[str | None, DType]] = MappingProxyType(
    {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
)


def stored_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the stored dtype of all layers' linear weights that are not packed.

    None if dtypes differ, if a weight is not stored as one plain tensor, or if all are packed.
    """
    config = checkpoint.config
    if config.outline is not None:  # its modules have all in the dtype that they compute in
        return None
    layers = [layer_tensors(config, layer) for layer in range(config.n_layers)]
    return _only_dtype(checkpoint, layers)


def linear_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the stored dtype of all linear weights, the LM head's included.

    None as `stored_dtype`.
    """
    config = checkpoint.config
    if config.outline is not None:
        return None
    layers = [layer_tensors(config, layer) for layer in range(config.n_layers)]
    return _only_dtype(checkpoint, [*layers, head_tensors(config)])


def _only_dtype(checkpoint: Checkpoint, tables: Sequence[Table]) -> DType | None:
    found = {
        _tensor_dtype(checkpoint, name)
        for tensors in tables
        for name, shape in tensors.items()
        if is_quantizable(name, shape) and not _is_packed(checkpoint, name)
    }
    return found.pop() if len(found) == 1 else None


def _is_packed(checkpoint: Checkpoint, name: str) -> bool:
    tensor = checkpoint.tensors.get(name)
    return tensor is not None and tensor.packed is not None


def weight_form(checkpoint: Checkpoint, choice: KernelChoice) -> WeightForm:
    """Return the form of the checkpoint's weights in memory with the kernel `choice`."""
    if choice.unpacks:
        return WeightForm(dtype=choice.dtype)
    stays = linear_dtype(checkpoint) is choice.stored_dtype
    return WeightForm(
        dtype=choice.dtype,
        quant=choice.quant,
        linear_dtype=choice.stored_dtype if stays else choice.dtype,
        packed=packed_sizes(checkpoint),
        held_dtype=choice.held_dtype,
    )


def is_streamable(found: DType | None, packed: PackedSizes | None, wanted: DType) -> bool:
    """Say whether layers can be streamed: all weights are packed, or in the `wanted` dtype.

    `found` is what `stored_dtype` returned.
    """
    if packed is None:
        return found is wanted
    return packed.can_stream and (packed.is_all or found is wanted)


def check_streamable(
    path: object, found: DType | None, packed: PackedSizes | None, wanted: DType
) -> None:
    """Raise CheckpointError unless layers can be streamed; `path` names the checkpoint in it."""
    if is_streamable(found, packed, wanted):
        return
    stored = f"are stored in {found.value}" if found else "have to be converted when they are read"
    flag = "" if found in (None, DType.FLOAT16) else f"--dtype {found.value} or "
    raise CheckpointError(
        f"--stream-layers: {path}: the weights {stored} and this node computes in {wanted.value}",
        remedy=f"use {flag}--quant int8, whose layers can be streamed from any checkpoint",
    )


def _tensor_dtype(checkpoint: Checkpoint, name: str) -> DType | None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None or not tensor.is_stored_matrix:
        return None
    return STORED_FLOATS.get(tensor.dtype)
