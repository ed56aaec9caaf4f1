"""Files that torch.save wrote: a zip archive with a pickle and one member per storage.

Knows which member is what. The pickle is followed and never run (torch_pickle.py). Must not know
names of tensors. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.torch_pickle import (
    MAX_PICKLE_BYTES,
    PickledTensor,
    pickled_tensors,
)
from shardnet.checkpoint.formats.zip_directory import Member, read_directory
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    ByteRange,
    StoredTensor,
    TensorFile,
    hash_ranges,
)
from shardnet.checkpoint.tensors.weight_sample import MAX_SAMPLES
from shardnet.errors import CheckpointError

MAX_HEAD_RANGES: Final = (1 << 16) - MAX_SAMPLES
"""Cap on the stretches of a file between its storages: with the samples 65536, as on the wire."""


def read_torch_file(path: Path, prefix: str = "") -> TensorFile:
    """Read which tensors a file holds, and where; `prefix` goes before their names.

    Raises CheckpointError, which names the file, when it is damaged, of torch before 1.6, or its
    pickle is more than a dict of tensors. Nothing of it is executed.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"PK\3\4":
                raise CheckpointError(
                    f"{path}: no zip archive of torch.save: damaged, or of torch before 1.6; save "
                    "it anew with torch.save, or convert the checkpoint to safetensors"
                )
            members = read_directory(path, file, size_bytes)
            folder, pickle = _find_pickle(path, members)
            file.seek(pickle.offset)
            data = file.read(min(pickle.size_bytes, MAX_PICKLE_BYTES + 1))
            order = members.get(f"{folder}byteorder")
            if order is not None:
                file.seek(order.offset)
                if file.read(min(order.size_bytes, 16)) != b"little":
                    raise CheckpointError(f"{path}: it is not little-endian; save it anew")
        storages = {
            name.removeprefix(f"{folder}data/"): member
            for name, member in members.items()
            if name.startswith(f"{folder}data/")
        }
        tensors = [
            _stored(path, prefix + name, tensor, storages)
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
        raise CheckpointError(f"{path}: {error.strerror}; {AGAIN}") from error


def _find_pickle(path: Path, members: Mapping[str, Member]) -> tuple[str, Member]:
    """Find the pickle, and in which folder of the archive everything is."""
    for name, member in members.items():
        if name == "data.pkl" or (name.count("/") == 1 and name.endswith("/data.pkl")):
            return name.removesuffix("data.pkl"), member
    raise CheckpointError(f"{path}: it holds no data.pkl, so torch.save did not write it; {AGAIN}")


def _stored(
    path: Path, name: str, tensor: PickledTensor, storages: Mapping[str, Member]
) -> StoredTensor:
    """Find a tensor's bytes: from its first element to its last."""
    storage = tensor.storage
    member = storages.get(storage.key)
    item_bytes = ITEM_BYTES[storage.dtype]
    if member is None or member.size_bytes != storage.n_elements * item_bytes:
        raise CheckpointError(
            f"{path}: the storage {storage.key!r} of tensor {name} is missing or of another size "
            f"than {storage.n_elements} elements; {AGAIN}"
        )
    steps = zip(tensor.shape, tensor.strides, strict=True)
    n_elements = 1 + sum((n - 1) * stride for n, stride in steps) if all(tensor.shape) else 0
    if tensor.offset + n_elements > storage.n_elements:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(tensor.shape)} lies beyond its storage; {AGAIN}"
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
    """List what is no storage."""
    ranges: list[ByteRange] = []
    at = 0
    for member in sorted(storages, key=lambda member: (member.offset, member.size_bytes)):
        if member.offset < at:
            raise CheckpointError(f"{path}: one storage lies over another; {AGAIN}")
        if member.offset > at:
            ranges.append((at, member.offset - at))
        at = member.offset + member.size_bytes
    ranges.append((at, size_bytes - at))
    if len(ranges) > MAX_HEAD_RANGES or sum(n for _, n in ranges) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: more lies between its storages than torch.save writes; convert the "
            "checkpoint to safetensors"
        )
    return tuple(ranges)
