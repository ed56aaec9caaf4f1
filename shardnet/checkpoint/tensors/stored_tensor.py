"""Stored tensors: which bytes of which file, and how they are read.

A *stored tensor* is the unit that nodes transfer and replicas store. Model tensors are made of them
(checkpoint/tensors/model_tensor.py). Knows files and bytes. Must not know
the formats of files, nor what a tensor means. Imports torch only to read one.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from shardnet.checkpoint.tensors.checkpoint_files import find_file, open_file
from shardnet.errors import CheckpointError, ShardnetError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES: Final = 32 << 20
"""Cap on all of one file that is no tensor, before memory is taken for it."""
MAX_HEADERS_BYTES: Final = 256 << 20
"""Cap on all of a checkpoint's files that is no tensor; the largest known has 30 MB."""
MAX_FILE_TENSORS: Final = 1 << 17
"""Cap on the tensors of one file; DeepSeek-V3 has 91 000 in all of its files."""
MAX_TENSORS: Final = 1 << 18
"""Cap on the tensors of a checkpoint; the largest known, Kimi-K2-Thinking, has 210 000."""
MAX_FILES: Final = 4096
"""Cap on the tensor files of a checkpoint."""
MAX_AXES: Final = 8
MAX_ELEMENTS: Final = 1 << 48
"""Cap on a tensor's elements, and on the product of its axes that are not empty."""
MAX_NAME_CHARACTERS: Final = 512
"""Cap on a tensor's name."""

Item = TypeVar("Item")

AGAIN: Final = "fetch the checkpoint again"

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
    | {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
)
"""Bytes of one element, by safetensors' name of the type."""

READ_AT_A_TIME: Final = 1 << 23
"""Bytes that are read from a disk between two reports of it."""

_SORTED_AT_ONCE: Final = 1 << 14

ByteRange = tuple[int, int]
"""(offset, number of bytes) in a file."""


class StoredRow(NamedTuple):
    """Row `number` of a stored tensor, of `n_bytes`."""

    tensor: str
    number: int
    n_bytes: int


AskRows = Callable[[str, Sequence[StoredRow]], bytearray]
"""Brings rows of the model with an id from other nodes, one behind the other, and waits for them.

Called by any thread but the loop's. Raises LostShardError if no node gives them.
"""


def damaged(what: str) -> CheckpointError:
    """Make the error for files that are not as they were published, which says `what` is wrong."""
    return CheckpointError(what, remedy=AGAIN)


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
    """A file with tensors. `heads` are the byte ranges outside tensors, `sha256` their digest.

    `absent` names tensors that an index places in the file and that are not there.
    """

    name: str
    size_bytes: int
    heads: tuple[ByteRange, ...]
    sha256: str
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    absent: tuple[str, ...] = ()


class FileTotals:
    """Adds up what the files of one checkpoint hold, to stop at the first beyond the caps."""

    def __init__(self, where: Path) -> None:
        """Begin at nothing; `where` names the checkpoint in errors."""
        self._where = where
        self._n_files = self._n_tensors = self._head_bytes = 0

    def add(self, file: TensorFile) -> TensorFile:
        """Count a file and return it. Raises CheckpointError above a cap."""
        self._n_files += 1
        self._n_tensors += len(file.tensors)
        self._head_bytes += sum(n_bytes for _, n_bytes in file.heads)
        for what, n, most in (
            ("tensor files", self._n_files, MAX_FILES),
            ("tensors", self._n_tensors, MAX_TENSORS),
            ("bytes of headers", self._head_bytes, MAX_HEADERS_BYTES),
        ):
            if n > most:
                raise damaged(f"{self._where}: more than {most} {what} up to {file.name}")
        return file


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


class FileState(NamedTuple):
    """What tells a file that was opened from one that was cut off, or put in its place."""

    size_bytes: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Look at a file. Raises CheckpointError if it is missing or no regular file."""
        try:
            found = find_file(path)
        except OSError as error:
            raise damaged(f"{path} cannot be read ({error.strerror})") from error
        if found is None:
            raise damaged(f"{path} cannot be read (it is missing)")
        return cls(found.st_size, found.st_ino)


def read_stored(
    folder: Path,
    tensor: StoredTensor,
    opened: FileState,
    came: Callable[[int], None] = lambda n_bytes: None,
) -> torch.Tensor:
    """Read a stored tensor into memory of its own.

    It has the stored shape and type; of a packed type it is [rows, bytes of a row] in uint8. `came`
    is called with the bytes of each piece read; if it raises, reading ends. `opened` is what the
    file was when the checkpoint was opened. Nothing is mapped, since the process would die if the
    file shrank. Raises CheckpointError if the file is gone, was replaced, or has another size.
    """
    import torch

    path = folder / tensor.file
    kind = _torch_types().get(tensor.dtype)
    if not tensor.size_bytes:
        return torch.empty(tensor.shape, dtype=kind or torch.uint8)
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno())
            if (found.st_size, found.st_ino) != opened:
                raise file_changed(path)
            return _shaped(tensor, kind, _read(file, path, tensor, came))
    except OSError as error:
        raise damaged(f"{path}: tensor {tensor.name} cannot be read ({error.strerror})") from error


def _read(
    file: RawIOBase, path: Path, tensor: StoredTensor, came: Callable[[int], None]
) -> torch.Tensor:
    """Read the bytes of a tensor. Raises CheckpointError if the file has shrunk, and OSError."""
    import torch

    raw = torch.empty(tensor.size_bytes, dtype=torch.uint8)
    file.seek(tensor.offset)
    for piece in torch.split(raw, READ_AT_A_TIME):
        left = piece.numpy().data
        while left:
            n_bytes = file.readinto(left)
            if not n_bytes:
                raise file_changed(path)
            left = left[n_bytes:]
        came(piece.numel())
    return raw


def _shaped(tensor: StoredTensor, kind: torch.dtype | None, raw: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in its shape and type."""
    if kind is None:
        return raw.view(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
    elements = raw.view(kind)
    if tensor.strides is not None:
        return elements.as_strided(tensor.shape, tensor.strides)
    return elements.view(tensor.shape)


def check_unchanged(path: Path, opened: FileState) -> None:
    """Raise CheckpointError unless a file is there as it was when it was opened."""
    if FileState.of(path) != opened:
        raise file_changed(path)


def file_changed(path: Path) -> CheckpointError:
    """Return the error for a file that was written, truncated or replaced while it is in use."""
    return damaged(f"{path}: it has changed since it was opened")


def prefetch_stored(folder: Path, tensor: StoredTensor, n_bytes: int) -> None:
    """Prefetch the first `n_bytes` of a stored tensor, if the system supports that.

    Raises nothing. Request few bytes: a system with many requests for a disk blocks.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ShardnetError), open_file(folder / tensor.file) as file:
        soon = min(n_bytes, tensor.size_bytes)
        os.posix_fadvise(file.fileno(), tensor.offset, soon, os.POSIX_FADV_WILLNEED)


def end_of(path: Path, tensors: Iterable[StoredTensor], start: int) -> int:
    """Return the end of the last tensor of a file, whose first may begin at `start`, in bytes.

    Raises CheckpointError if tensors overlap each other, or the bytes before `start`.
    """
    end = start
    for info in in_order(tensors, lambda info: (info.offset, info.size_bytes)):
        if info.offset < end:
            raise damaged(f"{path}: tensor {info.name} lies over another one")
        end = info.offset + info.size_bytes
    return end


def hash_ranges(path: Path, ranges: Iterable[ByteRange]) -> str:
    """Return the SHA-256 of some bytes of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        for offset, n_bytes in ranges:
            file.seek(offset)
            left = n_bytes
            while left and (piece := file.read(min(left, READ_AT_A_TIME))):
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()


def in_order(items: Iterable[Item], key: Callable[[Item], Any]) -> Iterable[Item]:
    """Sort `items`, which may be many, without keeping other threads from running meanwhile."""
    listed = list(items)
    cuts = range(0, len(listed), _SORTED_AT_ONCE)
    parts = [sorted(listed[at : at + _SORTED_AT_ONCE], key=key) for at in cuts]
    return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=key)


def check_name(path: Path, name: str) -> None:
    """Raise CheckpointError for a tensor's name that is too long, or unfit for a message."""
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise damaged(
            f"{path}: {name!r:.80} cannot name a tensor: it has {len(name)} characters, expected "
            f"at most {MAX_NAME_CHARACTERS} that can be printed"
        )


def is_possible(shape: Sequence[int]) -> bool:
    """Return whether a tensor can have this shape, whose numbers are any integers."""
    if len(shape) > MAX_AXES or any(not 0 <= n <= MAX_ELEMENTS for n in shape):
        return False
    return math.prod(n for n in shape if n) <= MAX_ELEMENTS


def _torch_types() -> Mapping[str, torch.dtype]:
    """The types whose elements torch has, by safetensors' name."""
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
    }
