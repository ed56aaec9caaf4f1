"""The headers of safetensors files.

Knows the byte layout (github.com/huggingface/safetensors). Must not know names of tensors.
"""

from __future__ import annotations

import math
from pathlib import Path

from shardnet.checkpoint.tensors.json_files import parse_object
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    StoredTensor,
    TensorFile,
    end_of,
    hash_ranges,
)
from shardnet.errors import CheckpointError


def read_safetensors_file(path: Path) -> TensorFile:
    """Read and check the header of one file.

    Raises CheckpointError, which names the file, when it is truncated or damaged.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({size_bytes} bytes, "
                    f"header claims {length})",
                    remedy=AGAIN,
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy=AGAIN) from error
    entries = parse_object(header, path)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, path, 8 + length) for name, entry in entries.items()}
    end = end_of(path, tensors.values(), 8 + length)
    if end != size_bytes:
        raise CheckpointError(
            f"{path}: {size_bytes} bytes long, its header describes {end}: truncated or damaged",
            remedy=AGAIN,
        )
    heads = ((0, 8 + length),)
    return TensorFile(
        name=path.name,
        size_bytes=size_bytes,
        heads=heads,
        sha256=hash_ranges(path, heads),
        tensors=tensors,
    )


def _tensor(name: str, entry: object, path: Path, data_start: int) -> StoredTensor:
    """Check one header entry."""
    match entry:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "data_offsets": [int(begin), int(stop)],
        } if all(isinstance(n, int) and n >= 0 for n in shape):
            size_bytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
            if 0 <= begin <= stop and (dtype not in ITEM_BYTES or stop - begin == size_bytes):
                return StoredTensor(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    size_bytes=stop - begin,
                    file=path.name,
                    offset=data_start + begin,
                )
    raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged", remedy=AGAIN)
