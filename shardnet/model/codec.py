"""The one bridge between bytes on the wire and tensors.

Knows how a row-major little-endian payload maps to a tensor, without a copy where there is none to
make. Must not know frames.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from shardnet.errors import RemoteProtocolError
from shardnet.types import DType

assert sys.byteorder == "little", "the wire is little-endian and tensors are not swapped"

_TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a DType."""
    return _TORCH_DTYPES[dtype]


def to_bytes(tensor: Tensor) -> memoryview:
    """View the tensor's elements as bytes, row-major.

    No copy for a contiguous CPU tensor: the view shares its memory and keeps it alive.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(
    buffer: bytes | bytearray | memoryview,
    dtype: DType,
    rows: int,
    width: int,
    device: torch.device,
) -> Tensor:
    """Make a [rows, width] tensor of `dtype` from a payload.

    On the CPU it shares a writable payload's memory: neither side may write to it. Raises
    RemoteProtocolError when the payload is not rows x width x dtype bytes long.
    """
    size_bytes = memoryview(buffer).nbytes
    expected = rows * width * dtype.size_bytes
    if size_bytes != expected:
        raise RemoteProtocolError(
            f"activations of {rows} x {width} {dtype.value} take {expected} bytes, "
            f"{size_bytes} came"
        )
    if expected == 0:
        return torch.empty(rows, width, dtype=torch_dtype(dtype), device=device)
    if memoryview(buffer).readonly:  # torch has no read-only tensors and warns
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch_dtype(dtype)).view(rows, width).to(device)
