"""Read the files that torch.save writes: a zip archive with a pickle and one member per storage.

Knows which member is what, and reads the archive's directory within a cap. The pickle is
interpreted and never executed (torch_pickle.py). Must not know names of tensors. Imports no torch.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.torch_pickle import (
    MAX_PICKLE_BYTES,
    PickledTensor,
    pickled_tensors,
)
from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.checkpoint.tensors.manifest import MAX_SAMPLES
from shardnet.checkpoint.tensors.stored_tensor import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    ByteRange,
    StoredTensor,
    TensorFile,
    check_name,
    damaged,
    hash_ranges,
    is_possible,
)
from shardnet.errors import CheckpointError

MAX_DIRECTORY_BYTES: Final = 2 << 20
"""Cap on the archive's list of members before memory is taken for it: some 18 000 of torch's."""
MAX_HEAD_RANGES: Final = (1 << 16) - MAX_SAMPLES
"""Cap on the byte ranges between a file's storages: with the samples 65536, as on the wire."""

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Signature, then the lengths of name and extra field (PKWARE's APPNOTE.TXT, section 4.3.7)."""
_SIGNATURE: Final = b"PK\3\4"
_TO_SAFETENSORS: Final = "convert the checkpoint to safetensors"


@dataclass(frozen=True, slots=True)
class Member:
    """The bytes of one member of an archive."""

    offset: int
    size_bytes: int


def read_torch_file(path: Path) -> TensorFile:
    """List the tensors of a file that torch.save wrote.

    Raises CheckpointError, which names the file, when it is damaged, older than torch 1.6, or its
    pickle is more than a dict of tensors. Nothing of it is executed.
    """
    try:
        with _CappedReader(open_file(path)) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if file.read(4) != _SIGNATURE:
                raise CheckpointError(
                    f"{path}: not a zip archive of torch.save: damaged, or of torch before 1.6",
                    remedy=f"save it anew with torch.save, or {_TO_SAFETENSORS}",
                )
            members = _read_members(path, file, size_bytes)
            folder, pickle = _find_pickle(path, members)
            file.seek(pickle.offset)
            data = file.read(min(pickle.size_bytes, MAX_PICKLE_BYTES + 1))
            order = members.get(f"{folder}byteorder")
            if order is not None:
                file.seek(order.offset)
                if file.read(min(order.size_bytes, 16)) != b"little":
                    raise CheckpointError(
                        f"{path}: its tensors are not little-endian", remedy="save it anew"
                    )
        storages = {
            name.removeprefix(f"{folder}data/"): member
            for name, member in members.items()
            if name.startswith(f"{folder}data/")
        }
        tensors = [
            _stored(path, name, tensor, storages)
            for name, tensor in pickled_tensors(data, str(path)).items()
        ]
        heads = _between(path, storages.values(), size_bytes)
        return TensorFile(
            name=path.name,
            size_bytes=size_bytes,
            heads=heads,
            sha256=hash_ranges(path, heads),
            tensors={tensor.name: tensor for tensor in tensors},
        )
    except OSError as error:
        raise damaged(f"{path}: {error.strerror}") from error


class _CappedReader(io.BufferedReader):
    """A file that caps each read at the largest allowed directory of an archive."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, or the rest. Raises BadZipFile above the cap."""
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {size} bytes, at most {MAX_DIRECTORY_BYTES}")
        return super().read(size)


def _read_members(path: Path, file: _CappedReader, size_bytes: int) -> dict[str, Member]:
    """Return where the members of an archive of `size_bytes` are, by name.

    Raises CheckpointError, which names `path`, for an archive that is damaged or compressed.
    """
    members: dict[str, Member] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.filename in members:
                    raise zipfile.BadZipFile(f"member {info.filename!r:.80} is there twice")
                if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                    raise zipfile.BadZipFile(
                        f"member {info.filename!r:.80} is compressed, which torch never does"
                    )
                members[info.filename] = _locate(file, info, size_bytes)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        raise damaged(f"{path}: damaged zip archive: {error}") from error
    return members


def _locate(file: _CappedReader, info: zipfile.ZipInfo, size_bytes: int) -> Member:
    """Find the bytes of a member, which follow its own header."""
    header = b""
    if info.header_offset < size_bytes:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER.size)
    if len(header) == _LOCAL_HEADER.size:
        signature, n_name, n_extra = _LOCAL_HEADER.unpack(header)
        offset = info.header_offset + _LOCAL_HEADER.size + n_name + n_extra
        if signature == _SIGNATURE and offset + info.file_size <= size_bytes:
            return Member(offset, info.file_size)
    raise zipfile.BadZipFile(f"member {info.filename!r:.80} is not where the directory says")


def _find_pickle(path: Path, members: Mapping[str, Member]) -> tuple[str, Member]:
    """Return the top folder of the archive, and the pickle in it."""
    for name, member in members.items():
        if name == "data.pkl" or (name.count("/") == 1 and name.endswith("/data.pkl")):
            return name.removesuffix("data.pkl"), member
    raise damaged(f"{path}: it holds no data.pkl, so torch.save did not write it")


def _stored(
    path: Path, name: str, tensor: PickledTensor, storages: Mapping[str, Member]
) -> StoredTensor:
    """Locate a tensor's bytes: from its first element to its last."""
    check_name(path, name)
    storage = tensor.storage
    member = storages.get(storage.key)
    item_bytes = ITEM_BYTES[storage.dtype]
    if member is None or member.size_bytes != storage.n_elements * item_bytes:
        raise damaged(
            f"{path}: the storage {storage.key!r:.80} of tensor {name} is missing or of another "
            f"size than {storage.n_elements} elements"
        )
    if not is_possible(tensor.shape):
        raise damaged(f"{path}: tensor {name} of shape {list(tensor.shape)} is impossible")
    steps = zip(tensor.shape, tensor.strides, strict=True)
    n_elements = 1 + sum((n - 1) * stride for n, stride in steps) if all(tensor.shape) else 0
    if tensor.offset + n_elements > storage.n_elements:
        raise damaged(
            f"{path}: tensor {name} of shape {list(tensor.shape)} lies beyond its storage"
        )
    return StoredTensor(
        name=name,
        dtype=storage.dtype,
        shape=tensor.shape,
        size_bytes=n_elements * item_bytes,
        file=path.name,
        offset=member.offset + tensor.offset * item_bytes,
        strides=None if tensor.strides == _row_by_row(tensor.shape) else tensor.strides,
    )


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _between(path: Path, storages: Iterable[Member], size_bytes: int) -> tuple[ByteRange, ...]:
    """List the byte ranges of a file outside all storages."""
    ranges: list[ByteRange] = []
    at = 0
    for member in sorted(storages, key=lambda member: (member.offset, member.size_bytes)):
        if member.offset < at:
            raise damaged(f"{path}: two storages overlap")
        if member.offset > at:
            ranges.append((at, member.offset - at))
        at = member.offset + member.size_bytes
    ranges.append((at, size_bytes - at))
    if len(ranges) > MAX_HEAD_RANGES or sum(n for _, n in ranges) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: more lies between its storages than torch.save writes",
            remedy=_TO_SAFETENSORS,
        )
    return tuple(ranges)
