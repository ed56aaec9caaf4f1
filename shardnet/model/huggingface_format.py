"""Checkpoints as transformers writes them: config.json beside tensors under the model's own names.

Knows which files there are. Must not know how their headers are laid out, nor families.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardnet.errors import CheckpointError
from shardnet.model.checkpoint_json import read_json
from shardnet.model.config import ModelConfig
from shardnet.model.contents import ID_FILES, INDEX_FILES, Contents
from shardnet.model.layout import canonical_name
from shardnet.model.making import ModelTensor, unchanged
from shardnet.model.safetensors_files import indexed_files, read_header
from shardnet.model.stored import TensorFile

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = INDEX_FILES[0]
WHOLE_FILES: Final = tuple(name for name in ID_FILES if name != "params.json")


def has_huggingface_tensors(folder: Path) -> bool:
    """Whether there are tensor files of the names that transformers gives them."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def open_huggingface(folder: Path) -> Contents:
    """Read config.json and the headers of the tensor files.

    Raises CheckpointError, which names the file, when one is missing, truncated or damaged.
    """
    where = folder / "config.json"
    config = read_json(where)
    index = None if (folder / SINGLE_FILE).exists() else INDEX_FILE
    files = _tensor_files(folder)
    stored = [info for file in files.values() for info in file.tensors.values()]

    def arrange(config: ModelConfig) -> Mapping[str, ModelTensor]:
        named = ((canonical_name(config, info.name), info) for info in stored)
        return {name: unchanged(name, info) for name, info in named}

    return Contents(
        folder=folder,
        config=config,
        where=where,
        files=files,
        whole=(*WHOLE_FILES, *([index] if index else [])),
        arrange=arrange,
    )


def _tensor_files(folder: Path) -> dict[str, TensorFile]:
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: read_header(folder / SINGLE_FILE)}
    if (folder / INDEX_FILE).exists():
        return indexed_files(folder / INDEX_FILE)
    raise CheckpointError(
        f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is here; "
        "convert the checkpoint to safetensors or fetch it again"
    )
