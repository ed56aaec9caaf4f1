"""What a format's reader finds in a checkpoint, in words that all formats share.

Knows what every format has to say of itself. Must not know any of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import TensorFile
from shardnet.model.config.model_config import ModelConfig

ID_FILES: Final = (
    "config.json",
    "generation_config.json",
    "params.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v1",
    "tokenizer.model.v2",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files besides the tensors that decide a model's output: part of its id if present."""

INDEX_FILES: Final = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors.index.json",
)
"""Indexes, which name the file of each tensor in checkpoints of several files."""

TENSOR_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pth")
"""Suffixes of tensor files."""

_BLOB: Final = re.compile(r"sha256-[0-9a-f]{64}")

Arrange = Callable[[ModelConfig], Mapping[str, ModelTensor]]
"""Maps the model's config to its parameters by name; a stored tensor that the family does not know
has its own name."""


def is_blob(name: str) -> bool:
    """Say whether a file is named by its digest, as Ollama does: a GGUF without a suffix."""
    return bool(_BLOB.fullmatch(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The headers of a checkpoint.

    `config` has the keys of config.json, and `where` names its file, for messages. `files` are
    those with tensors, all in `folder`; `whole` names those that belong to the model as a whole,
    tokenizer and config. `form` names how the weights are stored, "" for the dtype of most.
    `unknown_keys` are those that the format knows of no more than the families will, with values.
    """

    folder: Path
    config: Mapping[str, Any]
    where: str
    files: Mapping[str, TensorFile]
    whole: tuple[str, ...]
    arrange: Arrange
    form: str = ""
    unknown_keys: tuple[str, ...] = ()
