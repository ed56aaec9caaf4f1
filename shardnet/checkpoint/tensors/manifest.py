"""What a format's reader finds in a checkpoint, in words that all formats share.

Knows what every format has to say of itself. Must not know any of them.
"""

from __future__ import annotations

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
)
"""What, beside the tensors, decides what a model says: part of its id where present."""

INDEX_FILES: Final = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors.index.json",
)
"""Which file has which tensor, of checkpoints in several files."""

TENSOR_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pth")
"""How the names of tensor files end."""

Arrange = Callable[[ModelConfig], Mapping[str, ModelTensor]]
"""From the model's config to its parameters by name; a stored tensor without a place in it keeps
its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint, its headers read.

    `config` is in the words of config.json, and `where` names its file, for messages. `files` are
    those with tensors, all in `folder`, and `whole` the names of those that belong to the model as
    they are, tokenizer and config.
    """

    folder: Path
    config: Mapping[str, Any]
    where: str
    files: Mapping[str, TensorFile]
    whole: tuple[str, ...]
    arrange: Arrange
