"""Whether the weights of products lie in a checkpoint's files as they are computed with.

Knows headers. Must not know torch: the planner asks here. Layers are streamed
(streaming/layer_stream.py) without rounding only from such files; others would have to be made anew
at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor, as_stored
from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import head_tensors, is_rounded, layer_tensors
from shardnet.stage.estimate.memory_estimate import WeightForm
from shardnet.types import DType

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint
    from shardnet.model.kernels.linear import KernelChoice

_DTYPES: Final[Mapping[str | None, DType]] = MappingProxyType(
    {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
)


def dtype_in_place(checkpoint: Checkpoint) -> DType | None:
    """Return the dtype in which all layers' products lie in the files, None where one does not."""
    config = checkpoint.config
    found = set()
    for layer in range(config.n_layers):
        for name, shape in layer_tensors(config, layer).items():
            if is_rounded(name, shape):
                found.add(_lies_in(checkpoint, name))
    return found.pop() if len(found) == 1 else None


def products_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the dtype in which all products lie in the files, the LM head's too; else None."""
    found = {dtype_in_place(checkpoint)}
    for name, shape in head_tensors(checkpoint.config).items():
        if is_rounded(name, shape):
            found.add(_lies_in(checkpoint, name))
    return found.pop() if len(found) == 1 else None


def weight_form(checkpoint: Checkpoint, choice: KernelChoice) -> WeightForm:
    """Return what the weights are that a stage loads for the kernel of `choice`."""
    is_kept = products_dtype(checkpoint) is choice.stored_dtype
    return WeightForm(
        dtype=choice.dtype,
        rounded=choice.quantization,
        products=choice.stored_dtype if is_kept else choice.dtype,
    )


def check_in_place(path: object, found: DType | None, wanted: DType) -> None:
    """Raise CheckpointError unless weights that lie in `found` are computed with in `wanted`."""
    if found is wanted:
        return
    lie = f"are stored in {found.value}" if found else "have to be made of what is stored"
    way = "" if found in (None, DType.FLOAT16) else f"--dtype {found.value} or "
    raise CheckpointError(
        f"--stream-layers: {path}: the weights {lie} and this node computes in {wanted.value}; "
        f"use {way}--quant int8, whose layers can be streamed from any checkpoint"
    )


def _lies_in(checkpoint: Checkpoint, name: str) -> DType | None:
    tensor = checkpoint.tensors.get(name)
    return None if tensor is None or _made(tensor) else _DTYPES.get(tensor.dtype)


def _made(tensor: ModelTensor) -> bool:
    """Whether a parameter is more than one part of one file, whose elements stand row by row."""
    if tensor.make is not as_stored or len(tensor.sources) != 1 or len(tensor.shape) != 2:
        return True
    return tensor.sources[0].strides is not None
