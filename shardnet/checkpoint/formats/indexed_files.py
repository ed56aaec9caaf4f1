"""Tensor files named by an index, a JSON file that maps each tensor to its file.

Must not know the layout of a tensor file, nor the meaning of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.stored_tensor import AGAIN, StoredTensor, TensorFile
from shardnet.errors import CheckpointError

ReadFile = Callable[[Path], TensorFile]


def read_indexed_files(index: Path, read: ReadFile) -> dict[str, TensorFile]:
    """Read the headers of all files that `index` names, with `read`; return them by file name.

    Each has only the tensors that the index places in it. Raises CheckpointError, which names the
    file, if a tensor is not in its file.
    """
    placed: dict[str, dict[str, StoredTensor]] = {}
    files: dict[str, TensorFile] = {}
    for name, file in weight_map(index).items():
        path = index.parent / file
        if file not in files:
            files[file] = read(path)
        if name not in files[file].tensors:
            raise CheckpointError(f"{path}: tensor {name} is missing", remedy=AGAIN)
        placed.setdefault(file, {})[name] = files[file].tensors[name]
    return {name: replace(file, tensors=placed[name]) for name, file in files.items()}


def weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor from the file `index`.

    Raises CheckpointError, which names the index, where it is malformed or names a file outside its
    own folder.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: weight_map is missing or empty", remedy=AGAIN)
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: tensor {name} is in {file!r}, expected a file name without a folder",
                remedy=AGAIN,
            )
    return files
