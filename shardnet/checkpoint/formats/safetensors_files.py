"""The headers of safetensors files.

Knows the byte layout (github.com/huggingface/safetensors). Must not know names of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.checkpoint.tensors.json_files import YIELDING, bound_counts, scan_text
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    ITEM_BYTES,
    MAX_AXES,
    MAX_FILE_TENSORS,
    MAX_HEADER_BYTES,
    StoredTensor,
    TensorFile,
    check_name,
    end_of,
    hash_ranges,
    is_possible,
)
from shardnet.errors import CheckpointError

MAX_ENTRY_BYTES: Final = 1024
"""Cap on what the header says of one tensor, its name aside."""
_MOST: Final = {b":": 5 * MAX_FILE_TENSORS, b",": 10 * MAX_FILE_TENSORS}
"""An entry has four colons and, with MAX_AXES, eleven commas; metadata has some of both."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """What the header says of one tensor."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[_Number], msgspec.Meta(max_length=MAX_AXES)]
    data_offsets: tuple[_Number, _Number]


_BEGIN: Final = re.compile(r"[ \t\r\n]*\{[ \t\r\n]*")
_NAME: Final = re.compile(r'[ \t\r\n]*"')
_COLON: Final = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")
_NEXT: Final = re.compile(r"[ \t\r\n]*([,}])")
_ENTRY: Final = msgspec.json.Decoder(_Entry)


def read_safetensors_file(path: Path) -> TensorFile:
    """Read and check the header of one file.

    Raises CheckpointError, which names the file, when it is truncated or damaged.
    """
    try:
        with open_file(path) as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({size_bytes} bytes, "
                    f"header claims {length}, at most {MAX_HEADER_BYTES} are read)",
                    remedy=AGAIN,
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy=AGAIN) from error
    bound_counts(header, path, _MOST)
    tensors: dict[str, StoredTensor] = {}
    try:
        for name, entry in _entries(header.decode()):
            tensors[name] = _tensor(name, entry, path, 8 + length)
            if len(tensors) > MAX_FILE_TENSORS:
                raise CheckpointError(
                    f"{path}: more than {MAX_FILE_TENSORS} tensors in one file", remedy=AGAIN
                )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})", remedy=AGAIN) from error
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


def _entries(header: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor and what a header says of it. Raises ValueError if damaged.

    Other threads run between any two: a parser of the whole would keep them waiting.
    """
    at = _after(_BEGIN, header, 0)
    more = header[at : at + 1] != "}"
    while more:
        name, at = scan_text(header, _after(_NAME, header, at))
        at = _after(_COLON, header, at)
        if name == "__metadata__":
            _, end = YIELDING.raw_decode(header, at)
        else:
            end = header.find("}", at) + 1
            if not end:
                raise ValueError(f"the entry at character {at} does not end")
            yield name, header[at:end]
        at = _after(_NEXT, header, end)
        more = header[at - 1] == ","
    at += header[at : at + 1] == "}"  # of an empty header
    if header[at:].strip(" \t\r\n"):
        raise ValueError(f"more follows after character {at}")


def _after(what: re.Pattern[str], header: str, at: int) -> int:
    """Return where the match of `what` at `at` ends."""
    found = what.match(header, at)
    if found is None:
        raise ValueError(f"damaged at character {at}")
    return found.end()


def _tensor(name: str, text: str, path: Path, data_start: int) -> StoredTensor:
    """Check one header entry."""
    check_name(path, name)
    entry = _decode(text)
    if entry is None:
        raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged", remedy=AGAIN)
    begin, stop = entry.data_offsets
    return StoredTensor(
        name=name,
        dtype=entry.dtype,
        shape=tuple(entry.shape),
        size_bytes=stop - begin,
        file=path.name,
        offset=data_start + begin,
    )


def _decode(text: str) -> _Entry | None:
    """Decode one entry; None if it is malformed or contradicts itself."""
    if len(text) > MAX_ENTRY_BYTES:
        return None
    try:
        entry = _ENTRY.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    begin, stop = entry.data_offsets
    if begin > stop or not is_possible(entry.shape):
        return None
    item_bytes = ITEM_BYTES.get(entry.dtype)
    is_size = item_bytes is None or math.prod(entry.shape) * item_bytes == stop - begin
    return entry if is_size else None
