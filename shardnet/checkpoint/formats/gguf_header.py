"""The header of a GGUF file: its metadata, and the locations of its tensors.

Knows the byte layout (github.com/ggml-org/ggml, docs/gguf.md), version 2 and 3, little-endian.
Counts and lengths are checked against caps and against the file before memory is taken. Must not
know what a key means, nor how values of a tensor are packed. Imports neither torch nor numpy.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, has_file, open_file
from shardnet.checkpoint.tensors.manifest import is_blob
from shardnet.checkpoint.tensors.stored_tensor import MAX_FILES
from shardnet.errors import CheckpointError, shown

MAX_HEADER_BYTES: Final = 64 << 20
"""Cap on all that comes before the tensors' bytes; Gemma 3's have 15 MB."""
MAX_ELEMENTS: Final = 1 << 22
"""Cap on the elements of all arrays of a header together; Gemma 3's have 1.3 million."""
MAX_TEXTS: Final = 1 << 21
"""Cap on those of them that are texts; Gemma 3's have 800 000."""
MAX_KEYS: Final = 4096
MAX_TENSORS: Final = 1 << 15
"""Cap on the tensors of one file, in which all experts of a layer are one."""
MAX_NAME_BYTES: Final = 512
"""Cap on the name of a key or of a tensor."""
_AT_ONCE: Final = 1 << 16
"""Elements that are unpacked in one call, while other threads wait."""
MAX_DIMENSIONS: Final = 4
MAX_SIZE: Final = 1 << 44
"""Cap on a dimension and on an offset, far above any file."""

Scalar = int | float | bool | str
MetadataValue = Scalar | list[Scalar]
"""The value of a key. Bytes of text that are not UTF-8 become lone surrogates (surrogateescape)."""

_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAGIC: Final = b"GGUF"
_BESIDE_MODELS = re.compile(r"(?i)((.*[-._])?mmproj([-._].*)?|imatrix.*|.*imatrix|mtp-.*)\.gguf")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor as the header lists it.

    `shape` has the rows first, as in torch; the file has it the other way round. `type_number` is
    ggml's. `offset` counts from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The content of a file before the tensors' bytes, which begin at `head_bytes`."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    head_bytes: int
    size_bytes: int


def gguf_files(path: Path) -> list[Path]:
    """List the files of the GGUF checkpoint at `path`, in order; none if it is not a GGUF.

    `path` is a file (see `is_gguf`), any part of one (`-00001-of-0000N`), or a folder with exactly
    one model, beside which a projector of images may stand. The first file has the metadata. A file
    with layers that predict further tokens comes last, if one is beside it (`ahead_name`).

    Raises CheckpointError if a part is missing or the folder has several GGUFs.
    """
    if path.is_dir():
        try:
            names = folder_entries(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror}", remedy="check the path of --model"
            ) from error
        found = [path / name for name in names if name.endswith(".gguf")] or [
            path / name for name in names if is_blob(name) and is_gguf(path / name)
        ]
        found = [file for file in found if is_model_name(file.name)] or found
        wholes = {file.with_name(first_part_name(file.name)) for file in found}
        if len(wholes) > 1:
            raise CheckpointError(
                f"{path} holds {len(wholes)} GGUF models",
                remedy=f"name one of them with --model, as {min(wholes)}",
            )
        return _parts(found[0]) if found else []
    return _parts(_target(path)) if path.suffix == ".gguf" or is_gguf(path) else []


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a GGUF file: by its suffix, else by its first bytes."""
    if not os.path.isfile(path):  # unlike Path's, it raises nothing
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open_file(path.resolve()) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, CheckpointError):
        return False


def _target(path: Path) -> Path:
    """Follow a link that whoever asks has named, as a link to a folder may be.

    Not so from NAME.gguf to another kind of name: in the Hub's cache the link has the file's name,
    elsewhere it is refused if it leaves its folder.
    """
    target = path.resolve() if path.is_symlink() else path
    return target if target.suffix == ".gguf" or path.suffix != ".gguf" else path


def is_model_name(name: str) -> bool:
    """Whether a GGUF called `name` is a model, not what is beside one: a projector, statistics."""
    return _BESIDE_MODELS.fullmatch(name) is None


def is_projector_name(name: str) -> bool:
    """Whether a file called `name` is a GGUF that reads pictures for a model beside it."""
    return name.endswith(".gguf") and "mmproj" in name.lower()


def _parts(path: Path) -> list[Path]:
    parts = [path.with_name(name) for name in part_names(path.name)]
    for part in parts:
        if len(parts) > 1 and not has_file(part):
            raise CheckpointError(
                f"{part}: this part is missing", remedy=f"fetch all {len(parts)} parts"
            )
    ahead = path.with_name(ahead_name(path.name))
    return [*parts, ahead] if has_file(ahead) else parts


def part_names(name: str) -> list[str]:
    """List the names of all files of the GGUF model with the file `name`, in order."""
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match[3]) <= MAX_FILES:
        return [name]
    return [f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]


def ahead_name(name: str) -> str:
    """Return what llama.cpp calls a file with layers that predict further tokens for `name`."""
    match = _SHARD.fullmatch(name)
    return f"mtp-{match[1]}.gguf" if match else f"mtp-{name}"


def first_part_name(name: str) -> str:
    """Return the name of the first file of the GGUF model with the file `name`."""
    match = _SHARD.fullmatch(name)
    return f"{match[1]}-00001-of-{match[3]}.gguf" if match else name


def first_texts(path: Path, keys: Collection[str]) -> dict[str, str]:
    """Read texts as `first_values` does."""
    found = first_values(path)
    return {key: text for key in keys if isinstance(text := found.get(key), str)}


def first_values(path: Path) -> dict[str, MetadataValue]:
    """Read one file's metadata as far as the tokenizer's, which is long; no lists.

    Raises CheckpointError as `read_gguf_header` does.
    """
    found: dict[str, MetadataValue] = {}
    with _opened(path) as cursor:
        _, n_keys = _begin(cursor)
        for _ in range(n_keys):
            key = cursor.name()
            if key.startswith("tokenizer."):
                break
            value = _value(cursor)
            if not isinstance(value, list):
                found[key] = value
    return found


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one file.

    Raises CheckpointError, which names the file and the key or tensor, when it is truncated or
    claims what cannot be.
    """
    with _opened(path) as cursor:
        return _read(cursor)


@contextmanager
def _opened(path: Path) -> Iterator[_Cursor]:
    try:
        with io.BufferedReader(open_file(path)) as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            yield _Cursor(file, path, size_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy="fetch it again") from error


class _Cursor:
    """Reads the header from its beginning, never beyond the cap or the file's end."""

    def __init__(self, file: BinaryIO, path: Path, size_bytes: int) -> None:
        self._file = file
        self._path = path
        self.size_bytes = size_bytes
        self.at = 0
        self.what = "its first bytes"
        """The item being read, for messages."""
        self.n_elements = self.n_texts = 0

    def damaged(self, why: str) -> CheckpointError:
        """Make an error that names the file and the item being read."""
        return CheckpointError(f"{self._path}: {self.what}: {why}", remedy="fetch the file again")

    @property
    def left(self) -> int:
        """Bytes left to read."""
        return min(self.size_bytes, MAX_HEADER_BYTES) - self.at

    def take(self, n_bytes: int) -> bytes:
        """Read exactly so many bytes."""
        if n_bytes > self.left:
            raise self.damaged(
                f"truncated: claims {n_bytes} bytes, but only {self.left} remain of the file's "
                f"{self.size_bytes} and the {MAX_HEADER_BYTES} that a header may have"
            )
        data = self._file.read(n_bytes)
        if len(data) < n_bytes:
            raise self.damaged("the file became shorter while it was read")
        self.at += n_bytes
        return data

    def number(self, kind: str) -> int:
        """Read one number, given as struct's letter."""
        size = struct.calcsize("<" + kind)
        value: int = struct.unpack("<" + kind, self.take(size))[0]
        return value

    def count(self, at_least: int, cap: int) -> int:
        """Read a count of entries: at most `cap`, each of at least `at_least` bytes."""
        value = self.number("Q")
        if value > cap or value * at_least > self.left:
            raise self.damaged(
                f"claims {value} entries, but only {self.left} bytes remain and at most {cap} "
                "entries are read"
            )
        return value

    def text(self) -> str:
        """Read a string."""
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def texts(self, n_texts: int) -> list[Scalar]:
        """Read so many strings. A vocabulary has 400 000: a call for each would take a second."""
        made: list[Scalar] = []
        read, left = self._file.read, self.left
        while len(made) < n_texts:
            n_bytes = int.from_bytes(read(8), "little")
            if n_bytes + 8 > left:
                self._file.seek(self.at)
                made.append(self.text())  # raises
            made.append(read(n_bytes).decode("utf-8", "surrogateescape"))
            left -= n_bytes + 8
            self.at += n_bytes + 8
        if self._file.tell() < self.at:
            raise self.damaged("the file became shorter while it was read")
        return made

    def name(self) -> str:
        """Read the name of a key or of a tensor, which is UTF-8."""
        n_bytes = self.number("Q")
        if MAX_NAME_BYTES < n_bytes <= self.left:
            raise self.damaged(f"a name of {n_bytes} bytes, at most {MAX_NAME_BYTES} are read")
        try:
            return self.take(n_bytes).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"a name that is not UTF-8 ({error.reason})") from error


def _begin(cursor: _Cursor) -> tuple[int, int]:
    """Read how many tensors and keys of metadata there are."""
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise cursor.damaged("this is not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        raise cursor.damaged(
            f"GGUF version {version}, {'a big-endian file; ' if big else ''}supported: 2 and 3 in "
            "little-endian"
        )
    cursor.what = "the number of tensors"
    n_tensors = cursor.count(24, MAX_TENSORS)
    cursor.what = "the number of metadata keys"
    return n_tensors, cursor.count(13, MAX_KEYS)


def _read(cursor: _Cursor) -> GgufHeader:
    n_tensors, n_keys = _begin(cursor)
    metadata: dict[str, MetadataValue] = {}
    for _ in range(n_keys):
        key = cursor.name()
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} occurs twice")
        cursor.what = f"key {key!r}"
        metadata[key] = _value(cursor)
    infos = [_tensor(cursor, number) for number in range(n_tensors)]
    cursor.what = "the list of tensors"
    if len({info.name for info in infos}) < n_tensors:
        raise cursor.damaged("a tensor occurs twice")
    cursor.what = "general.alignment"
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise cursor.damaged(f"{shown(alignment)} is not a number of bytes from 1 to 1048576")
    start = -(-cursor.at // alignment) * alignment
    if start > cursor.size_bytes:
        if infos:
            raise cursor.damaged(f"truncated: {cursor.size_bytes} bytes, tensors begin at {start}")
        start = cursor.size_bytes
    return GgufHeader(
        metadata=metadata,
        tensors=tuple(
            GgufTensor(
                name=info.name,
                shape=info.shape,
                type_number=info.type_number,
                offset=info.offset + start,
            )
            for info in infos
        ),
        head_bytes=start,
        size_bytes=cursor.size_bytes,
    )


def _value(cursor: _Cursor) -> MetadataValue:
    kind = cursor.number("I")
    if kind != _ARRAY:
        return _scalar(cursor, kind)
    kind = cursor.number("I")
    if kind == _STRING:
        return cursor.texts(_n_texts(cursor))
    if kind not in _SCALARS:
        raise cursor.damaged(f"an array of type {kind}, which is not known")
    letter = _SCALARS[kind]
    size = struct.calcsize("<" + letter)
    return [value for part in _numbers(cursor, letter, size) for value in part]


def _numbers(cursor: _Cursor, letter: str, size: int) -> Iterator[tuple[Scalar, ...]]:
    """Read an array of numbers, some at a time."""
    left = _length(cursor, size)
    while left:
        n = min(left, _AT_ONCE)
        yield struct.unpack(f"<{n}{letter}", cursor.take(n * size))
        left -= n


def _scalar(cursor: _Cursor, kind: int) -> Scalar:
    if kind == _STRING:
        return cursor.text()
    if kind not in _SCALARS:
        raise cursor.damaged(f"a value of type {kind}, which is not known")
    return cursor.number(_SCALARS[kind])


def _length(cursor: _Cursor, element_bytes: int) -> int:
    n_elements = cursor.count(element_bytes, MAX_ELEMENTS - cursor.n_elements)
    cursor.n_elements += n_elements
    return n_elements


def _n_texts(cursor: _Cursor) -> int:
    n_texts = _length(cursor, 8)
    cursor.n_texts += n_texts
    if cursor.n_texts > MAX_TEXTS:
        raise cursor.damaged(f"{cursor.n_texts} texts with it, at most {MAX_TEXTS} are read")
    return n_texts


def _tensor(cursor: _Cursor, number: int) -> GgufTensor:
    """Read one entry; its offset counts from the start of the tensors' bytes."""
    cursor.what = f"the entry of tensor {number}"
    name = cursor.name()
    cursor.what = f"tensor {name!r}"
    n_dimensions = cursor.number("I")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"{n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("Q") for _ in range(n_dimensions))[::-1]
    type_number, offset = cursor.number("I"), cursor.number("Q")
    if max(*shape, offset, math.prod(shape)) > MAX_SIZE or min(shape) < 1:
        raise cursor.damaged(f"shape {list(shape)} at offset {offset} is impossible")
    return GgufTensor(name=name, shape=shape, type_number=type_number, offset=offset)
