"""Read parts of tensors from any checkpoint, and write them into a replica.

Knows the bytes of a part, the layout of a replica, and how its integrity is verified. Must not know
where parts come from.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import starmap
from pathlib import Path
from typing import Final

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica_journal import JOURNAL_FILE, FileStamp, Journal, n_parts
from shardnet.checkpoint.sparse_files import let_holes
from shardnet.checkpoint.tensors.checkpoint_files import is_file_name, open_file
from shardnet.checkpoint.tensors.manifest import (
    ID_FILES,
    INDEX_FILES,
    MAX_SAMPLES,
    SAMPLE_BYTES,
    TENSOR_SUFFIXES,
    is_blob,
)
from shardnet.checkpoint.tensors.stored_tensor import (
    MAX_HEADER_BYTES,
    ByteRange,
    FileHead,
    StoredTensor,
)
from shardnet.errors import CapacityError, CheckpointError, ShardnetError, shortage
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.types import WEIGHT_PART_BYTES, LayerRange

MAX_FILE_BYTES: Final = 1 << 44
"""Cap on a file's size before it is laid out."""
MAX_HEAD_BYTES: Final = MAX_HEADER_BYTES + 8 + MAX_SAMPLES * SAMPLE_BYTES
"""Cap on the bytes of one file that the model's id covers."""
MAX_HEADS_BYTES: Final = 1 << 30
"""Cap on the bytes of all files that the model's id covers, before any is fetched."""
SYNC_BYTES: Final = 64 << 20
"""Bytes written to a replica between flushes to the disk, so that the last flush is short."""
_HASH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Part `number` of a stored tensor: `size_bytes` at `offset` of `file`."""

    tensor: str
    number: int
    file: str
    offset: int
    size_bytes: int

    def __str__(self) -> str:
        return f"part {self.number} of tensor {self.tensor}"


def parts_of(info: StoredTensor) -> list[TensorPart]:
    """Split a tensor into the parts in which it is transferred and stored."""
    return [
        TensorPart(
            tensor=info.name,
            number=number,
            file=info.file,
            offset=info.offset + number * WEIGHT_PART_BYTES,
            size_bytes=min(WEIGHT_PART_BYTES, info.size_bytes - number * WEIGHT_PART_BYTES),
        )
        for number in range(n_parts(info.size_bytes))
    ]


def part_of(checkpoint: Checkpoint, tensor: str, number: int) -> TensorPart:
    """Locate part `number` of a tensor. Raises CheckpointError if the model has none."""
    info = checkpoint.stored.get(tensor)
    if info is None or number >= n_parts(info.size_bytes):
        raise CheckpointError(f"{checkpoint.path}: there is no part {number} of tensor {tensor}")
    return parts_of(info)[number]


def range_tensors(checkpoint: Checkpoint, layers: LayerRange) -> list[str]:
    """List the stored tensors that a stage with `layers` needs."""
    wanted = stage_tensors(checkpoint.config, layers).all
    made = (checkpoint.tensors[name] for name in wanted if name in checkpoint.tensors)
    sources = {source.name for tensor in made for source in tensor.sources}
    return [name for name in checkpoint.stored if name in sources]


def table_tensors(checkpoint: Checkpoint, layers: LayerRange) -> dict[str, StoredTensor]:
    """Return the stored tensors, by name, of which `layers` only look rows up."""
    names = stage_tensors(checkpoint.config, layers).looked_up
    made = (checkpoint.tensors[name] for name in names if name in checkpoint.tensors)
    return {source.name: source for tensor in made for source in tensor.row_sources}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayers:
    """Bytes of each layer as stored, and the ranges of layers of which every tensor is here.

    The embedding counts to the first layer, norm and LM head to the last. Of each layer's bytes
    those of tables that are `looked_up` are never loaded, and all that lacks of `but_tables`.
    """

    size_bytes: tuple[int, ...]
    held: tuple[LayerRange, ...]
    looked_up: tuple[int, ...] = ()
    but_tables: tuple[LayerRange, ...] = ()


NO_LAYERS: Final = StoredLayers(size_bytes=(), held=())


def stored_layers(checkpoint: Checkpoint) -> StoredLayers:
    """Return the stored size of each layer, and which layers are here."""
    sizes, tables, held, but_tables = [], [], list[LayerRange](), list[LayerRange]()
    for layer in range(checkpoint.config.n_layers):
        here = LayerRange(layer, layer + 1)
        wanted = stage_tensors(checkpoint.config, here)
        made = [checkpoint.tensors[name] for name in wanted.all if name in checkpoint.tensors]
        sources = {source.name: source.size_bytes for tensor in made for source in tensor.sources}
        own = [
            source
            for tensor in made
            if tensor.name in wanted.looked_up
            for source in tensor.row_sources
        ]
        tables.append(sum(table.size_bytes for table in own))
        sizes.append(sum(sources.values()))
        lacking = {*checkpoint.missing(sources)}
        if lacking <= {table.name for table in own}:
            ranges = but_tables if lacking else held
            begins = ranges.pop().start if ranges and ranges[-1].end == layer else layer
            ranges.append(LayerRange(begins, layer + 1))
    return StoredLayers(
        size_bytes=tuple(sizes),
        held=tuple(held),
        looked_up=tuple(tables),
        but_tables=tuple(but_tables),
    )


class TensorFiles:
    """The tensor files of a checkpoint folder, open for reading, or for writing too."""

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        self._folder = folder
        self._writable = writable
        self._open: dict[str, FileIO] = {}

    def read(self, file: str, offset: int, n_bytes: int) -> bytes:
        """Read exactly `n_bytes` at `offset`. Raises CheckpointError if there are fewer."""
        try:
            handle = self._handle(file)
            handle.seek(offset)
            data = handle.read(n_bytes)
        except OSError as error:
            raise CheckpointError(f"{self._folder / file}: {error.strerror}") from error
        if len(data) < n_bytes:
            raise CheckpointError(
                f"{self._folder / file}: {n_bytes} bytes expected at {offset}, found {len(data)}: "
                "the file has become shorter",
                remedy="load the model again",
            )
        return data

    def read_all(self, ranges: Sequence[tuple[str, int, int]]) -> bytes:
        """Read ranges (file, offset, bytes), which the system is asked for side by side first."""
        if sys.platform == "linux":
            for file, offset, n_bytes in ranges:
                number = self._handle(file).fileno()
                os.posix_fadvise(number, offset, n_bytes, os.POSIX_FADV_WILLNEED)
        return b"".join(starmap(self.read, ranges))

    def write(self, file: str, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`. Raises CapacityError on a full disk, else CheckpointError."""
        try:
            handle = self._handle(file)
            handle.seek(offset)
            while data:
                data = data[handle.write(data) :]
        except OSError as error:
            raise disk_error(error, self._folder) from error

    def digest(self, part: TensorPart) -> str:
        """Return the SHA-256 of a part as it is on disk, in hex."""
        digest = hashlib.sha256()
        for at in range(0, part.size_bytes, _HASH_BYTES):
            n_bytes = min(_HASH_BYTES, part.size_bytes - at)
            digest.update(self.read(part.file, part.offset + at, n_bytes))
        return digest.hexdigest()

    def sync(self, file: str) -> FileStamp:
        """Flush a file to the disk; return its stamp."""
        handle = self._handle(file)
        os.fsync(handle.fileno())
        return stamp_of(handle.fileno())

    def stamp(self, file: str) -> FileStamp:
        """Return a file's stamp. Raises CheckpointError if it cannot be opened."""
        try:
            return stamp_of(self._handle(file).fileno())
        except OSError as error:
            raise CheckpointError(f"{self._folder / file}: {error.strerror}") from error

    def close(self) -> None:
        """Close all files."""
        for handle in self._open.values():
            handle.close()
        self._open.clear()

    def _handle(self, file: str) -> FileIO:
        if file not in self._open:
            self._open[file] = open_file(self._folder / file, writable=self._writable)
        return self._open[file]


def stamp_of(file: int) -> FileStamp:
    """Return the size (bytes) and modification time (ns) of an open file."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


class Replica:
    """A replica open for writing: stores parts, and records which it has. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the replica in `folder`. Raises CheckpointError if it is damaged."""
        self.folder = folder
        self.checkpoint = Checkpoint.open(folder, ignore_unknown_config=True)
        journal = self.checkpoint.journal
        if journal is None:
            raise CheckpointError(f"{folder}: this is no replica, {JOURNAL_FILE} is missing")
        self._journal = journal
        self._unsynced_bytes = 0
        self._files = TensorFiles(folder, writable=True)

    def parts(self, tensors: Iterable[str]) -> list[TensorPart]:
        """List the parts of these tensors."""
        return [part for name in tensors for part in parts_of(self.checkpoint.stored[name])]

    def digest(self, part: TensorPart) -> str | None:
        """Return the SHA-256 of a part in hex, None if the replica lacks it."""
        return self._journal.digests.get(part.tensor, {}).get(part.number)

    def write(self, part: TensorPart, at: int, data: memoryview) -> None:
        """Write bytes of a part, `at` bytes after its start. Raises as TensorFiles.write."""
        self._files.write(part.file, part.offset + at, data)

    def record(self, part: TensorPart, sha256: str) -> None:
        """Record that a part was written completely, and its SHA-256 in hex."""
        self._unsynced_bytes += part.size_bytes
        with self._disk_errors():
            self._journal.record(part.tensor, part.number, sha256)
            if self._unsynced_bytes >= SYNC_BYTES:
                self._files.sync(part.file)
                self._unsynced_bytes = 0

    def lacking_bytes(self, tensors: Iterable[str]) -> int:
        """Return the bytes of these tensors that the replica lacks."""
        return sum(part.size_bytes for part in self.parts(tensors) if self.digest(part) is None)

    def drop(self, part: TensorPart) -> None:
        """Record that a part must not be used any more."""
        with self._disk_errors():
            self._journal.drop(part.tensor, part.number)

    def unverified(self, tensors: Iterable[str]) -> list[TensorPart]:
        """List the recorded parts in the files of these tensors that were not left sealed.

        A file is not sealed after a crash, or if another process has written to it.
        """
        files = {self.checkpoint.stored[name].file for name in tensors}
        open_files = {f for f in files if self._journal.seals.get(f) != self._files.stamp(f)}
        held = self._journal.digests.keys() & self.checkpoint.stored.keys()
        infos = [self.checkpoint.stored[name] for name in sorted(held)]
        return [
            part
            for info in infos
            if info.file in open_files
            for part in parts_of(info)
            if self.digest(part) is not None
        ]

    def check(self, part: TensorPart) -> bool:
        """Return whether a recorded part matches its digest; drop it if not."""
        is_right = self._files.digest(part) == self.digest(part)
        if not is_right:
            self.drop(part)
        return is_right

    def seal(self, files: Iterable[str]) -> None:
        """Flush these files to the disk, and record their stamps."""
        with self._disk_errors():
            self._journal.seal({file: self._files.sync(file) for file in files})

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self.checkpoint.path) from error


def check_heads(heads: Sequence[FileHead], peer: str) -> None:
    """Raise CheckpointError, which names the `peer`, unless these can be the files of a model.

    A name must be that of a known file or of a tensor file, without any folder.
    """
    for head in heads:
        whole = head.name in ID_FILES or head.name in INDEX_FILES
        plain = whole or (
            (head.name.endswith(TENSOR_SUFFIXES) or is_blob(head.name))
            and not head.name.startswith(".")
            and is_file_name(head.name)
        )
        fits = _are_apart(head.ranges, head.size_bytes) and head.head_bytes <= MAX_HEAD_BYTES
        if not plain or not fits or head.size_bytes > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{peer} offers a file that no model has: {head.name!r} of {head.size_bytes} bytes"
            )
        if whole and head.head_bytes != head.size_bytes:
            raise CheckpointError(f"{peer} offers only a part of {head.name}")
    if sum(head.head_bytes for head in heads) > MAX_HEADS_BYTES:
        raise CheckpointError(f"{peer} offers more than {MAX_HEADS_BYTES} bytes beside tensors")
    if len({head.name.casefold() for head in heads}) != len(heads):  # one file on some systems
        raise CheckpointError(f"{peer} offers a file twice")


def _are_apart(ranges: Sequence[ByteRange], size_bytes: int) -> bool:
    """Whether the ranges of a file lie in it, in order and without overlap."""
    end = 0
    for offset, n_bytes in ranges:
        if offset < end:
            return False
        end = offset + n_bytes
    return end <= size_bytes


def lay_out(folder: Path, heads: Sequence[FileHead]) -> TensorFiles:
    """Create the files of a replica, sparse, in the empty `folder`; open them.

    `heads` must have passed `check_heads`. Raises CapacityError if the disk is full, else
    CheckpointError.
    """
    try:
        for head in heads:
            (folder / head.name).parent.mkdir(mode=0o700, exist_ok=True)
            with (folder / head.name).open("xb", buffering=0) as file:
                let_holes(file)
                file.truncate(head.size_bytes)
    except OSError as error:
        raise disk_error(error, folder) from error
    return TensorFiles(folder, writable=True)


def begin_replica(folder: Path, model_id: str, peer: str) -> None:
    """Begin a replica without tensors in a `folder` of files laid out with their heads.

    Raises CheckpointError, which names the `peer`, if they are of another model than `model_id`.
    """
    checkpoint = Checkpoint.open(folder, ignore_unknown_config=True)
    came = checkpoint.model_id
    if came != model_id:
        raise CheckpointError(f"{peer} offered model {model_id[:12]} and sent {came[:12]}")
    try:
        Journal.begin(folder, checkpoint.sample_digests)
    except OSError as error:
        raise disk_error(error, folder) from error


def disk_error(error: OSError, folder: Path) -> ShardnetError:
    """Map an OSError of writing to `folder`, in the cache, to an error with a remedy."""
    if (short := shortage(error, folder)) is not None:
        return short
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(
            f"{folder}: {error.strerror}",
            remedy="free room there, run `shardnet cache rm`, or name another place with "
            "SHARDNET_CACHE_DIR",
        )
    return CheckpointError(
        f"{folder}: {error.strerror}",
        remedy="name a place that this node may write with SHARDNET_CACHE_DIR",
    )
