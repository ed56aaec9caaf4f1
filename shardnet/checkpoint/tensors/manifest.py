"""What a format's reader finds in a checkpoint, and the sample of its weights that is its id.

Two fine-tunes of one shape have the same headers and differ in nearly every weight, so a few bytes
of each tensor distinguish them. Bounded: at most MAX_SAMPLES reads of SAMPLE_BYTES each, however
large the model is. docs/protocol.md section 16 specifies it for other implementations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import ByteRange, StoredTensor, TensorFile, in_order
from shardnet.model.config.model_config import ModelConfig

TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
"""The chat template for requests with tools, where transformers writes several into files."""
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
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
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


SAMPLE_BYTES: Final = 1024
"""Bytes read from the middle of a tensor."""
MAX_SAMPLES: Final = 4096
"""Cap on the tensors of one model that are sampled: on a disk, or over HTTP, each costs a read."""
_DIGITS: Final = re.compile(r"[0-9]+")


def sampled_tensors(
    tensors: Iterable[StoredTensor], limit: int = MAX_SAMPLES
) -> list[StoredTensor]:
    """Choose the tensors to sample, in order of file, offset and name.

    All of them, up to `limit`. Beyond it tensors whose names differ only in digits share an equal
    part of the limit, so that the thousands of expert weights are thinned out and every router,
    norm and attention weight stays.
    """
    ordered = list(in_order(tensors, lambda info: (info.file, info.offset, info.name)))
    if len(ordered) <= limit:
        return ordered
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for info in ordered:
        groups[_DIGITS.sub("#", info.name)].append(info)
    chosen: set[str] = set()
    smallest_first = in_order(groups.items(), lambda item: (len(item[1]), item[0]))
    for done, (_, group) in enumerate(smallest_first):
        n = min(len(group), (limit - len(chosen)) // (len(groups) - done))
        chosen.update(group[index * len(group) // n].name for index in range(n))
    return [info for info in ordered if info.name in chosen]


def sample_range(info: StoredTensor) -> ByteRange:
    """Return (offset, number of bytes) of a tensor's sample in its file: its middle, or all."""
    n_bytes = min(SAMPLE_BYTES, info.size_bytes)
    return info.offset + (info.size_bytes - n_bytes) // 2, n_bytes


def merged(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return the same bytes as ranges in order, without overlap or gaps of no bytes."""
    found: list[ByteRange] = []
    for offset, n_bytes in sorted(ranges):
        end = offset + n_bytes
        if found and offset <= sum(found[-1]):
            start, had = found[-1]
            found[-1] = (start, max(end, start + had) - start)
        elif n_bytes:
            found.append((offset, n_bytes))
    return tuple(found)
