"""Stored tensors: which bytes of which file, and how to map them into memory.

A *stored tensor* is the unit that nodes transfer and replicas store. Model tensors are made of them
(checkpoint/tensors/model_tensor.py). Knows files and bytes. Must not know
the formats of files, nor what a tensor means. Imports torch only to read one.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shardnet.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES: Final = 100_000_000
"""Cap on all of one file that is no tensor, before memory is taken for it; safetensors' own."""

AGAIN: Final = "fetch the checkpoint again"

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2}
    | {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
)
"""Bytes of one element, by safetensors' name of the type."""

READ_AT_A_TIME: Final = 1 << 23
"""Bytes that are read from a disk between two reports of it."""

ByteRange = tuple[int, int]
"""(offset, number of bytes) in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as its file describes it; `name` is unique in its checkpoint.

    `dtype` is safetensors' name (F32, BF16, …), or the name of a type whose elements are packed
    into blocks, as GGUF's Q4_K. `offset` is where its bytes begin in the file. `strides` are the
    elements from one to the next along each axis, None if they are contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    offset: int
    strides: tuple[int, ...] | None = None

    def rows(self, begin: int, end: int) -> StoredTensor:
        """Return the rows [begin, end) of the first axis, which must be contiguous."""
        assert self.strides is None
        row_bytes = self.size_bytes // self.shape[0]
        return replace(
            self,
            shape=(end - begin, *self.shape[1:]),
            size_bytes=(end - begin) * row_bytes,
            offset=self.offset + begin * row_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A file with tensors. `heads` are the byte ranges outside tensors, `sha256` their digest."""

    name: str
    size_bytes: int
    heads: tuple[ByteRange, ...]
    sha256: str
    tensors: Mapping[str, StoredTensor] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHead:
    """A file of a checkpoint, and the byte ranges that its id covers: in order, without overlap.

    Of a file with tensors those are all bytes outside tensors, and samples of the tensors.
    """

    name: str
    size_bytes: int
    ranges: tuple[ByteRange, ...]

    @property
    def head_bytes(self) -> int:
        """Total bytes of the ranges."""
        return sum(n_bytes for _, n_bytes in self.ranges)


def read_stored(
    folder: Path,
    tensor: StoredTensor,
    file_bytes: int,
    came: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Map a stored tensor into memory: a CPU view of the file. Do not write to it.

    It has the stored shape and type; of a packed type it is [rows, bytes of a row] in uint8. The
    pages stay mapped until the view is freed. `file_bytes` is the size that the file had when it
    was opened. With `came` all of it is read now, and `came` is called with the bytes of each piece
    read; if it raises, reading ends. Raises CheckpointError if the file is gone or has changed its
    size.
    """
    import torch

    path = folder / tensor.file
    kind = _torch_types().get(tensor.dtype)
    if not tensor.size_bytes:
        return torch.empty(tensor.shape, dtype=kind or torch.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            if file.seek(0, 2) != file_bytes:
                raise CheckpointError(
                    f"{path}: its size has changed since it was opened", remedy=AGAIN
                )
            begin = tensor.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            inside = tensor.offset - begin
            # A private mapping, since torch warns of buffers that cannot be written.
            mapped = mmap.mmap(
                file.fileno(), inside + tensor.size_bytes, offset=begin, access=mmap.ACCESS_COPY
            )
    except OSError as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} cannot be read ({error.strerror})", remedy=AGAIN
        ) from error
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.size_bytes, offset=inside)
    if came is not None:
        for piece in torch.split(raw, READ_AT_A_TIME):
            piece[:: mmap.PAGESIZE].sum()  # a byte of each page: it is read, off Python's lock
            came(piece.numel())
    if kind is None:
        return raw.view(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()  # not where elements of this type may begin
    elements = raw.view(kind)
    if tensor.strides is not None:
        return elements.as_strided(tensor.shape, tensor.strides)
    return elements.view(tensor.shape)


def prefetch_stored(folder: Path, tensor: StoredTensor, n_bytes: int) -> None:
    """Prefetch the first `n_bytes` of a stored tensor, if the system supports that.

    Raises nothing. Request few bytes: a system with many requests for a disk blocks.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), (folder / tensor.file).open("rb", buffering=0) as file:
        soon = min(n_bytes, tensor.size_bytes)
        os.posix_fadvise(file.fileno(), tensor.offset, soon, os.POSIX_FADV_WILLNEED)


def end_of(path: Path, tensors: Iterable[StoredTensor], start: int) -> int:
    """Return the end of the last tensor of a file, whose first may begin at `start`, in bytes.

    Raises CheckpointError if tensors overlap each other, or the bytes before `start`.
    """
    end = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.size_bytes)):
        if info.offset < end:
            raise CheckpointError(f"{path}: tensor {info.name} lies over another one", remedy=AGAIN)
        end = info.offset + info.size_bytes
    return end


def hash_ranges(path: Path, ranges: Iterable[ByteRange]) -> str:
    """Return the SHA-256 of some bytes of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset, n_bytes in ranges:
            file.seek(offset)
            digest.update(file.read(n_bytes))
    return digest.hexdigest()


def _torch_types() -> Mapping[str, torch.dtype]:
    """The types whose elements torch has, by safetensors' name."""
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
    }
