"""Reads bytes of files into memory, and packs them on the way.

Weights that kernels need packed, but that are plain on disk, are packed by the thread that reads
them, a piece at a time: then they are still in its caches.

Knows files. Must not know what the bytes mean, nor which thread reads which piece.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.errors import CheckpointError
from shardnet.model.kernels.library import SCRATCH

_PACKED_AT_A_TIME: Final = 1 << 20
"""Bytes that are read before they are packed: they are still in the CPU's caches."""


class FileChanged(Exception):
    """A file is no longer what it was when its part was named."""


class Packing(Protocol):
    """Packs bytes of a file on their way into a buffer, in independent units."""

    @property
    def unit_bytes(self) -> int:
        """Stored bytes of a unit; the last unit may have fewer."""

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` stored bytes."""

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack whole units, or the last ones, uint8. Must be thread-safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes of a file that must stay as it is. `stamp` is its size, time of change and number."""

    path: Path
    offset: int
    size_bytes: int
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, offset: int, size_bytes: int) -> FilePart:
        """Name bytes of a file as it is now. Raises CheckpointError if it cannot be accessed."""
        try:
            stamp = _stamp(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror})", remedy="bring it back, then ask again"
            ) from error
        return cls(path=path, offset=offset, size_bytes=size_bytes, stamp=stamp)

    def cut(self, at_a_time: int) -> Iterator[FilePart]:
        """Split into parts of `at_a_time` bytes; the last may be shorter."""
        for begin in range(0, self.size_bytes, at_a_time):
            n_bytes = min(at_a_time, self.size_bytes - begin)
            yield replace(self, offset=self.offset + begin, size_bytes=n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A unit of work for one reading thread, and the bytes of the buffer it goes to."""

    part: FilePart
    begin: int
    end: int
    packing: Packing | None


def pieces_of(
    parts: Iterable[tuple[FilePart, Packing | None]], begin: int, at_a_time: int
) -> Iterator[Piece]:
    """Cut parts into pieces of about `at_a_time` bytes, one behind the other from `begin` on."""
    for part, packing in parts:
        size = at_a_time if packing is None else _units(at_a_time, packing)
        for some in part.cut(size):
            n_bytes = some.size_bytes if packing is None else packing.packed_bytes(some.size_bytes)
            yield Piece(part=some, begin=begin, end=begin + n_bytes, packing=packing)
            begin += n_bytes


def bring(buffer: Tensor, piece: Piece) -> None:
    """Read a piece into `buffer`, uint8, and pack it if necessary.

    Raises FileChanged, OSError if the file cannot be read, CheckpointError for a special file.
    """
    target, part, packing = buffer[piece.begin : piece.end], piece.part, piece.packing
    if _stamp(part.path) != part.stamp:
        raise FileChanged
    with open_file(part.path) as file:
        file.seek(part.offset)
        if packing is None:
            _read(file, target)
            return
        end = 0
        for some in part.cut(_units(_PACKED_AT_A_TIME, packing)):
            stored = SCRATCH.at_least(some.size_bytes)[: some.size_bytes]
            _read(file, stored)
            begin, end = end, end + packing.packed_bytes(some.size_bytes)
            packing(stored, target[begin:end])


def _units(n_bytes: int, packing: Packing) -> int:
    """Round `n_bytes` down to whole units, at least one."""
    return max(1, n_bytes // packing.unit_bytes) * packing.unit_bytes


def _read(file: RawIOBase, target: Tensor) -> None:
    array: Any = target.numpy()  # numpy's arrays are buffers, which its types do not say
    view = memoryview(array)
    while view:
        n_bytes = file.readinto(view)
        if not n_bytes:
            raise FileChanged
        view = view[n_bytes:]


def _stamp(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino
