"""Tensor files named by an index, a JSON file that maps each tensor to its file.

Must not know the layout of a tensor file, nor the meaning of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from shardnet.checkpoint.tensors.json_files import bound_counts, read_file
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    MAX_FILES,
    MAX_TENSORS,
    FileTotals,
    StoredTensor,
    TensorFile,
    check_name,
)
from shardnet.errors import CheckpointError

ReadFile = Callable[[Path], TensorFile]

MAX_INDEX_BYTES: Final = 32 << 20
"""Cap on an index; that of 210 000 tensors has 25 MB."""
MAX_FILE_NAME: Final = 255
"""Cap on the characters of a tensor file's name, as on the wire."""
_ROOM: Final = 1024
"""Colons and commas of an index beside one for each tensor."""


class _Index(msgspec.Struct):
    """What is read of an index."""

    weight_map: dict[str, str] = {}


_INDEX: Final = msgspec.json.Decoder(_Index)


def read_indexed_files(index: Path, read: ReadFile) -> dict[str, TensorFile]:
    """Read the headers of all files that `index` names, with `read`; return them by file name.

    Each has only the tensors that the index places in it. Raises CheckpointError, which names the
    file, if a tensor is not in its file.
    """
    placed: dict[str, dict[str, StoredTensor]] = {}
    files: dict[str, TensorFile] = {}
    totals = FileTotals(index)
    for name, file in weight_map(index).items():
        path = index.parent / file
        if file not in files:
            files[file] = totals.add(read(path))
        if name not in files[file].tensors:
            check_name(index, name)
            raise CheckpointError(f"{path}: tensor {name} is missing", remedy=AGAIN)
        placed.setdefault(file, {})[name] = files[file].tensors[name]
    return {name: replace(file, tensors=placed[name]) for name, file in files.items()}


def weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor from the file `index`.

    Raises CheckpointError, which names the index, where it is malformed or names a file outside its
    own folder.
    """
    text = read_file(index, MAX_INDEX_BYTES).removeprefix(b"\xef\xbb\xbf")
    bound_counts(text, index, dict.fromkeys((b":", b","), MAX_TENSORS + _ROOM))
    try:
        files = _INDEX.decode(text).weight_map
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{index}: expected a file name without a folder for each tensor of weight_map "
            f"({error})",
            remedy=AGAIN,
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not readable as JSON ({error})", remedy=AGAIN) from error
    if not files:
        raise CheckpointError(f"{index}: weight_map is missing or empty", remedy=AGAIN)
    names = set(files.values())
    if len(names) > MAX_FILES:
        raise CheckpointError(
            f"{index}: {len(names)} files, at most {MAX_FILES} are read", remedy=AGAIN
        )
    for file in names:
        is_plain = file.isprintable() and len(file) <= MAX_FILE_NAME and "\\" not in file
        if not is_plain or Path(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map names {file!r:.200}, expected a file name without a folder",
                remedy=AGAIN,
            )
    return files
