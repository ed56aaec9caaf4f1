"""The dtype in which a checkpoint stores linear weights, and whether a kernel computes with it.

Knows headers. Must not know torch: the planner calls it. Only such layers can be streamed
(streaming/layer_stream.py) without quantisation; others would have to be converted at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import head_tensors, is_quantizable, layer_tensors
from shardnet.stage.estimate.memory_estimate import WeightForm
from shardnet.types import DType

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint
    from shardnet.model.kernels.linear import KernelChoice

_DTYPES: Final[Mapping[str | None, DType]] = MappingProxyType(
    {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
)


def stored_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the stored dtype of all layers' linear weights.

    None if dtypes differ, or if a weight is not stored as one plain tensor.
    """
    config = checkpoint.config
    found = set()
    for layer in range(config.n_layers):
        for name, shape in layer_tensors(config, layer).items():
            if is_quantizable(name, shape):
                found.add(_tensor_dtype(checkpoint, name))
    return found.pop() if len(found) == 1 else None


def linear_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the stored dtype of all linear weights, the LM head's included.

    None as `stored_dtype`.
    """
    found = {stored_dtype(checkpoint)}
    for name, shape in head_tensors(checkpoint.config).items():
        if is_quantizable(name, shape):
            found.add(_tensor_dtype(checkpoint, name))
    return found.pop() if len(found) == 1 else None


def weight_form(checkpoint: Checkpoint, choice: KernelChoice) -> WeightForm:
    """Return the form of the checkpoint's weights in memory with the kernel `choice`."""
    stays = linear_dtype(checkpoint) is choice.stored_dtype
    return WeightForm(
        dtype=choice.dtype,
        quantization=choice.quantization,
        linear_dtype=choice.stored_dtype if stays else choice.dtype,
    )


def check_streamable_dtype(path: object, found: DType | None, wanted: DType) -> None:
    """Raise CheckpointError unless `found`, what `stored_dtype` returned, is the `wanted` one.

    `path` names the checkpoint in the message.
    """
    if found is wanted:
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
    return _DTYPES.get(tensor.dtype)
