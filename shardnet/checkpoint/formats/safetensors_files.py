"""The headers of safetensors files, and the index that maps each tensor to its file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shardnet.checkpoint.tensors.checkpoint_files import is_file_name, open_file
from shardnet.checkpoint.tensors.json_files import YIELDING, bound_counts, read_file, scan_text
from shardnet.checkpoint.tensors.stored_tensor import (
    ITEM_BYTES,
    MAX_AXES,
    MAX_FILE_TENSORS,
    MAX_FILES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    FileTotals,
    StoredTensor,
    TensorFile,
    check_name,
    damaged,
    end_of,
    hash_ranges,
    is_possible,
)
from shardnet.errors import CheckpointError, shown

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
                raise damaged(
                    f"{path}: truncated or not a safetensors file ({size_bytes} bytes, "
                    f"header claims {length}, at most {MAX_HEADER_BYTES} are read)"
                )
            header = file.read(length)
    except OSError as error:
        raise damaged(f"{path}: {error.strerror}") from error
    bound_counts(header, path, _MOST)
    tensors: dict[str, StoredTensor] = {}
    try:
        for name, entry in _entries(header.decode()):
            tensors[name] = _tensor(name, entry, path, 8 + length)
            if len(tensors) > MAX_FILE_TENSORS:
                raise damaged(f"{path}: more than {MAX_FILE_TENSORS} tensors in one file")
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path}: not readable as JSON ({error})") from error
    end = end_of(path, tensors.values(), 8 + length)
    if end != size_bytes:
        raise damaged(
            f"{path}: {size_bytes} bytes long, its header describes {end}: truncated or damaged"
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
        raise damaged(f"{path}: the header entry of tensor {name} is damaged")
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


ReadFile = Callable[[Path], TensorFile]

MAX_INDEX_BYTES: Final = 32 << 20
"""Cap on an index; that of 210 000 tensors has 25 MB."""
MAX_FILE_NAME: Final = 255
"""Cap on the characters of a tensor file's name, as on the wire."""
_ROOM: Final = 1024
"""Colons and commas of an index beside one for each tensor."""


def read_indexed_files(index: Path, read: ReadFile) -> dict[str, TensorFile]:
    """Read the headers of all files that `index` names, with `read`; return them by file name.

    Each has only the tensors that the index places in it; those that it lacks are its `absent`
    ones, see `refuse_absent`. Raises CheckpointError, which names the file, for a damaged one.
    """
    placed: dict[str, dict[str, StoredTensor]] = {}
    absent: dict[str, list[str]] = {}
    files: dict[str, TensorFile] = {}
    totals = FileTotals(index)
    for name, file in weight_map(index).items():
        if file not in files:
            files[file] = totals.add(read(index.parent / file))
        if name in files[file].tensors:
            placed.setdefault(file, {})[name] = files[file].tensors[name]
        else:
            check_name(index, name)
            absent.setdefault(file, []).append(name)
    return {
        name: replace(file, tensors=placed.get(name, {}), absent=tuple(absent.get(name, ())))
        for name, file in files.items()
    }


def refuse_absent(
    files: Iterable[TensorFile],
    folder: Path,
    lacking: Callable[[], Collection[str]],
    rename: Callable[[str], str | None],
) -> None:
    """Raise CheckpointError for a tensor that an index names, its file lacks and the model needs.

    `lacking` gives the parameters for which nothing is stored, `rename` maps the name of a stored
    tensor to that of its parameter, None for what is left out of the model. A part of a parameter,
    or a stack of several, is known by the module that it belongs to.
    """
    absent = [(name, folder / file.name) for file in files for name in file.absent]
    if not absent:
        return
    names = lacking()
    modules = {name[:at] for name in names for at in range(len(name)) if name[at] == "."}
    found: list[tuple[bool, str, Path]] = []
    for name, path in absent:
        own = rename(name) or ""
        if own in names or own.rpartition(".")[0] in modules:
            found.append((own not in names, name, path))
    if found:
        _, name, path = min(found)
        raise damaged(f"{path}: tensor {name} is missing")


def weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor from the file `index`.

    Raises CheckpointError, which names the index, where it is malformed or names a file outside its
    own folder.
    """
    text = read_file(index, MAX_INDEX_BYTES).removeprefix(b"\xef\xbb\xbf")
    bound_counts(text, index, dict.fromkeys((b":", b","), MAX_TENSORS + _ROOM))
    try:
        document = YIELDING.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(f"{index}: not readable as JSON ({error})") from error
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files:
        raise damaged(f"{index}: weight_map is missing or empty")
    for file in files.values():
        if not isinstance(file, str):
            raise _no_file_name(index, file)
    names = set(files.values())
    if len(names) > MAX_FILES:
        raise damaged(f"{index}: {len(names)} files, at most {MAX_FILES} are read")
    for file in names:
        if len(file) > MAX_FILE_NAME or not is_file_name(file):
            raise _no_file_name(index, file)
    return files


def _no_file_name(index: Path, found: object) -> CheckpointError:
    return damaged(
        f"{index}: weight_map names {shown(found)}, expected a file name without a folder"
    )
