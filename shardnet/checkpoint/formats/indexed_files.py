"""Tensor files named by an index, a JSON file that maps each tensor to its file.

Must not know the layout of a tensor file, nor the meaning of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardnet.checkpoint.tensors.json_files import YIELDING, bound_counts, read_file
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    MAX_FILES,
    MAX_TENSORS,
    FileTotals,
    StoredTensor,
    TensorFile,
    check_name,
)
from shardnet.errors import CheckpointError, shown

ReadFile = Callable[[Path], TensorFile]

MAX_INDEX_BYTES: Final = 32 << 20
"""Cap on an index; that of 210 000 tensors has 25 MB."""
MAX_FILE_NAME: Final = 255
"""Cap on the characters of a tensor file's name, as on the wire."""
_ROOM: Final = 1024
"""Colons and commas of an index beside one for each tensor."""


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
        document = YIELDING.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not readable as JSON ({error})", remedy=AGAIN) from error
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: weight_map is missing or empty", remedy=AGAIN)
    for file in files.values():
        if not isinstance(file, str):
            raise _no_file_name(index, file)
    names = set(files.values())
    if len(names) > MAX_FILES:
        raise CheckpointError(
            f"{index}: {len(names)} files, at most {MAX_FILES} are read", remedy=AGAIN
        )
    for file in names:
        is_plain = file.isprintable() and len(file) <= MAX_FILE_NAME and "\\" not in file
        if not is_plain or Path(file).name != file:
            raise _no_file_name(index, file)
    return files


def _no_file_name(index: Path, found: object) -> CheckpointError:
    return CheckpointError(
        f"{index}: weight_map names {shown(found)}, expected a file name without a folder",
        remedy=AGAIN,
    )
