"""The one bridge between bytes on the wire and tensors; rounds rows to narrower wire dtypes.

Knows how a row-major little-endian payload maps to a tensor, without a copy where possible, and how
rows are quantised for a narrower wire (docs/protocol.md section 9). Must not know
frames.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.errors import NumericalError, RemoteProtocolError
from shardnet.types import INT8_GROUP_COLUMNS, DType, WireDType, int8_groups

assert sys.byteorder == "little", "the wire is little-endian and tensors are not swapped"

Buffer = bytes | bytearray | memoryview

_TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


_INT8_MAX = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
_FLOAT16_OVERFLOW = 65520.0
"""The smallest magnitude that rounds to infinity in float16, whose largest number is 65504."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a DType."""
    return _TORCH_DTYPES[dtype]


def wire_of(dtype: torch.dtype) -> WireDType:
    """The wire dtype that keeps every bit of a tensor of `dtype`."""
    own = next(name for name, known in _TORCH_DTYPES.items() if known is dtype)
    return WireDType.own(own)


def to_bytes(tensor: Tensor) -> memoryview:
    """View the tensor's elements as bytes, row-major.

    No copy for a contiguous CPU tensor: the view shares its memory and keeps it alive.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(
    buffer: Buffer,
    dtype: DType,
    rows: int,
    width: int,
    device: torch.device,
) -> Tensor:
    """Make a [rows, width] tensor of `dtype` from a payload.

    On the CPU it shares a writable payload's memory: neither side may write to it. Raises
    RemoteProtocolError when the payload is not rows x width x dtype bytes long.
    """
    _check_size(buffer, rows, width, dtype.value, rows * width * dtype.size_bytes)
    return _viewed(buffer, torch_dtype(dtype)).view(rows, width).to(device)


def pack_rows(rows: Tensor, dtype: WireDType) -> memoryview:
    """Quantise or round rows [T, E] to a wire of `dtype` and return their payload.

    NaN and infinities arrive as NaN or infinities; with int8 their whole group of columns becomes
    NaN. Raises NumericalError for a finite value that would overflow float16.
    """
    if dtype.plain is None:
        return _pack_int8(rows.detach())
    if dtype is WireDType.FLOAT16 and rows.dtype != torch.float16:
        _check_fits_float16(rows)
    return to_bytes(rows.to(torch_dtype(dtype.plain)))


def unpack_rows(
    buffer: Buffer,
    dtype: WireDType,
    rows: int,
    width: int,
    device: torch.device,
) -> Tensor:
    """Make rows [rows, width] from a payload; an int8 wire gives float32.

    Like `from_bytes` it may share the payload's memory. Raises RemoteProtocolError, before any
    allocation, if the payload has not the size that `rows` and `width` imply.
    """
    if dtype.plain is not None:
        return from_bytes(buffer, dtype.plain, rows, width, device)
    _check_size(buffer, rows, width, dtype.value, rows * dtype.row_bytes(width))
    return _unpack_int8(buffer, rows, width, device)


def _pack_int8(rows: Tensor) -> memoryview:
    """Return all scales, then all values. A group too small for a normal scale becomes zeros."""
    n_rows, width = rows.shape
    n_groups = int8_groups(width)
    missing = n_groups * INT8_GROUP_COLUMNS - width
    columns = F.pad(rows.float(), (0, missing)) if missing else rows.float()
    groups = columns.view(n_rows, n_groups, INT8_GROUP_COLUMNS)
    # By a tensor: CUDA divides by a Python number by multiplying, which rounds otherwise.
    scales = groups.abs().amax(-1, keepdim=True).div_(groups.new_full((), _INT8_MAX))
    scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0)
    scales.masked_fill_(scales.isfinite().logical_not_(), torch.nan)
    values = (groups / scales).round_().nan_to_num_(0.0, 0.0, 0.0)  # of 0 / 0 and NaN: 0
    narrow = values.to(torch.int8).view(n_rows, width + missing)[:, :width]
    parts = (scales.reshape(-1).view(torch.uint8), narrow.reshape(-1).view(torch.uint8))
    return to_bytes(torch.cat(parts))


def _unpack_int8(buffer: Buffer, n_rows: int, width: int, device: torch.device) -> Tensor:
    n_groups = int8_groups(width)
    flat = _viewed(buffer, torch.uint8).to(device)
    cut = 4 * n_rows * n_groups
    scales = flat[:cut].view(torch.float32).view(n_rows, n_groups, 1)
    narrow = flat[cut:].view(torch.int8).view(n_rows, width)
    missing = n_groups * INT8_GROUP_COLUMNS - width
    values = (F.pad(narrow, (0, missing)) if missing else narrow).float()
    columns = values.view(n_rows, n_groups, INT8_GROUP_COLUMNS).mul_(scales)
    return columns.view(n_rows, width + missing)[:, :width]


def _viewed(buffer: Buffer, dtype: torch.dtype) -> Tensor:
    """View a payload as a flat CPU tensor; a read-only one is copied."""
    if memoryview(buffer).nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if memoryview(buffer).readonly:  # torch has no read-only tensors and warns
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=dtype)


def _check_size(buffer: Buffer, rows: int, width: int, dtype: str, expected: int) -> None:
    size_bytes = memoryview(buffer).nbytes
    if size_bytes != expected:
        raise RemoteProtocolError(
            f"activations of {rows} x {width} {dtype} take {expected} bytes, but {size_bytes} came"
        )


def _check_fits_float16(rows: Tensor) -> None:
    largest = float(rows.abs().amax()) if rows.numel() else 0.0
    if _FLOAT16_OVERFLOW <= largest < float("inf"):
        raise NumericalError(
            f"an activation of {largest:.4g} does not fit a float16 wire, which ends at 65504",
            remedy="use --wire-dtype bfloat16 or int8",
        )
