"""Checkpoints as transformers writes them: config.json beside tensors under the model's own names.

Knows which files there are: safetensors or torch's, one or several named by an index. Must not know
how their headers are laid out, nor families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardnet.errors import CheckpointError
from shardnet.model.checkpoint_json import read_json, read_weight_map
from shardnet.model.config import ModelConfig
from shardnet.model.contents import ID_FILES, INDEX_FILES, Contents
from shardnet.model.layout import canonical_name
from shardnet.model.making import ModelTensor, unchanged
from shardnet.model.safetensors_files import read_safetensors_file
from shardnet.model.stored import AGAIN, StoredTensor, TensorFile
from shardnet.model.torch_files import read_torch_file

ReadFile = Callable[[Path], TensorFile]

SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
"""Beside INDEX_FILES, in the same order: safetensors go first."""
_READERS: Final[tuple[ReadFile, ...]] = (read_safetensors_file, read_torch_file)
_WHOLE: Final = tuple(name for name in ID_FILES if name != "params.json")


def has_huggingface_tensors(folder: Path) -> bool:
    """Whether there are tensor files of the names that transformers gives them."""
    return any((folder / name).is_file() for name in (*SINGLE_FILES, *INDEX_FILES))


def open_huggingface(folder: Path) -> Contents:
    """Read config.json and the headers of the tensor files.

    Raises CheckpointError, which names the file, when one is missing, truncated or damaged.
    """
    where = folder / "config.json"
    config = read_json(where)
    index, files = _tensor_files(folder)
    stored = [info for file in files.values() for info in file.tensors.values()]

    def arrange(config: ModelConfig) -> Mapping[str, ModelTensor]:
        named = ((canonical_name(config, info.name), info) for info in stored)
        return {name: unchanged(name, info) for name, info in named}

    return Contents(
        folder=folder,
        config=config,
        where=where,
        files=files,
        whole=(*_WHOLE, *index),
        arrange=arrange,
    )


def _tensor_files(folder: Path) -> tuple[list[str], dict[str, TensorFile]]:
    """Read the headers; return the index too, where there is one."""
    for single, index, read in zip(SINGLE_FILES, INDEX_FILES, _READERS, strict=True):
        if (folder / single).exists():
            return [], {single: read(folder / single)}
        if (folder / index).exists():
            return [index], _indexed_files(folder / index, read)
    raise CheckpointError(
        f"{folder}: no tensors are here: neither {', '.join((*SINGLE_FILES, *INDEX_FILES))}, nor "
        "consolidated files beside params.json, nor a GGUF; fetch the checkpoint again"
    )


def _indexed_files(index: Path, read: ReadFile) -> dict[str, TensorFile]:
    """Read the headers of all files that the index names; keep the tensors it places in each."""
    placed: dict[str, dict[str, StoredTensor]] = {}
    files: dict[str, TensorFile] = {}
    for name, file in read_weight_map(index).items():
        path = index.parent / file
        if file not in files:
            files[file] = read(path)
        if name not in files[file].tensors:
            raise CheckpointError(f"{path}: tensor {name} is missing; {AGAIN}")
        placed.setdefault(file, {})[name] = files[file].tensors[name]
    return {name: replace(file, tensors=placed[name]) for name, file in files.items()}
