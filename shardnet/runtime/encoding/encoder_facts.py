"""What the files of an encoder say of it: its kind, how vectors are pooled, how long inputs may be.

Knows the files that sentence-transformers writes beside a model. Reads headers only; no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.checkpoint import gguf_file
from shardnet.checkpoint.formats.gguf import read_gguf_files
from shardnet.checkpoint.formats.gguf_header import first_texts, gguf_files
from shardnet.checkpoint.formats.gguf_types import form_name
from shardnet.checkpoint.formats.huggingface import open_huggingface
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import (
    MAX_JSON_BYTES,
    parse_value,
    read_file,
    read_json,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import AGAIN, FileState, TensorFile
from shardnet.errors import CheckpointError, UnsupportedModelError, shown
from shardnet.model.families.encoders import (
    GGUF_TYPES,
    EncoderConfig,
    is_encoder,
    read_encoder_config,
)
from shardnet.runtime.encoding.gguf_encoder import Pooling, gguf_encoder
from shardnet.runtime.loading.model_facts import Stamp, stamp

BATCH_POSITIONS: Final = 4096
"""Positions, padding included, that are computed at once, unless one input alone has more."""
MAX_BATCH: Final = 64
"""Inputs that are computed at once."""

_FLAGS: Final[dict[str, Pooling]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_ARCHITECTURE: Final = "general.architecture"
_FOLDER: Final = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """An encoder on this machine.

    Its vectors are pooled by `pooling` and have length 1 if they are `normalized`, None where no
    file says so. `context` is the most tokens of one input, special ones included. `lowers` says
    that texts are put in lower case first. `tensors` are its parameters, `opened` their files, by
    name in `folder`. `model_id` is SHA-256 in hex over config and headers.
    """

    path: Path
    stamp: Stamp
    config: EncoderConfig
    pooling: Pooling
    normalized: bool | None
    context: int
    lowers: bool
    folder: Path
    tensors: tuple[ModelTensor, ...]
    opened: dict[str, FileState]
    form: str
    size_bytes: int
    model_id: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in float32."""
        return 4 * sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def activation_bytes(self) -> int:
        """Bytes that computing the largest batch takes, about: rows of one layer, and its maps."""
        rows = max(BATCH_POSITIONS, self.context)
        return 4 * rows * (16 * self.config.hidden_size + self.config.n_maps * self.context)

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.weight_bytes + self.activation_bytes


def find_encoder(path: Path) -> EncoderFacts | None:
    """Read the headers of the encoder in a folder or a GGUF; None if something else is there.

    Raises CheckpointError if a file is damaged, UnsupportedModelError for what is not implemented.
    """
    file = gguf_file(path)
    if file is not None:
        is_one = first_texts(file, [_ARCHITECTURE]).get(_ARCHITECTURE) in GGUF_TYPES
        return _in_gguf(path) if is_one else None
    if not os.path.isdir(path) or not has_file(path / "config.json"):
        return None
    return _in_folder(path) if is_encoder(read_json(path / "config.json")) else None


def _in_gguf(path: Path) -> EncoderFacts:
    stamped, paths = stamp(path), gguf_files(path)
    headers, files = read_gguf_files(paths)
    stored = {name: one for file in files.values() for name, one in file.tensors.items()}
    raw, tensors, pooling = gguf_encoder(headers[0], stored, str(paths[0]))
    config = read_encoder_config(raw, str(paths[0]))
    return EncoderFacts(
        path=path,
        stamp=stamped,
        config=config,
        pooling=pooling,
        normalized=None,
        context=config.context,
        lowers=False,
        folder=paths[0].parent,
        tensors=tensors,
        opened={name: FileState.of(paths[0].with_name(name)) for name in files},
        form=form_name(headers[0].metadata.get("general.file_type")),
        size_bytes=sum(file.size_bytes for file in files.values()),
        model_id=_model_id(files.values(), config),
    )


def _in_folder(path: Path) -> EncoderFacts:
    stamped = stamp(path)
    contents = open_huggingface(path)
    if contents.form:
        raise UnsupportedModelError(f"{path}: an encoder with {contents.form} weights is not read")
    config = read_encoder_config(contents.config, contents.where)
    modules = _modules(path) if config.kind == "embedding" else None
    limits = _optional(path / "sentence_bert_config.json")
    stored = [tensor for file in contents.files.values() for tensor in file.tensors.values()]
    return EncoderFacts(
        path=path,
        stamp=stamped,
        config=config,
        pooling=_pooling(path / modules["Pooling"]) if modules and "Pooling" in modules else "mean",
        normalized=None if modules is None else "Normalize" in modules,
        context=min(config.context, _most_tokens(limits, config.context)),
        lowers=limits.get("do_lower_case") is True,
        folder=path,
        tensors=tuple(unchanged(tensor.name, tensor) for tensor in stored),
        opened={name: FileState.of(contents.folder / name) for name in contents.files},
        form=max(stored, key=lambda tensor: tensor.size_bytes).dtype if stored else "",
        size_bytes=sum(file.size_bytes for file in contents.files.values()),
        model_id=_model_id(contents.files.values(), config),
    )


def _model_id(files: Iterable[TensorFile], config: EncoderConfig) -> str:
    headers = [f"{file.name} {file.size_bytes} {file.sha256}" for file in files]
    headers.append(json.dumps(config.keys, sort_keys=True))
    return hashlib.sha256("\n".join(headers).encode()).hexdigest()


def _optional(path: Path) -> dict[str, Any]:
    """Read a JSON object that may be missing."""
    return read_json(path) if has_file(path) else {}


def _most_tokens(limits: dict[str, Any], most: int) -> int:
    n = limits.get("max_seq_length")
    return n if isinstance(n, int) and 0 < n < most else most


def _modules(folder: Path) -> dict[str, str] | None:
    """Return the folder of each module that sentence-transformers runs, None without its list.

    Raises UnsupportedModelError for other modules than a pooled, perhaps normalised, transformer.
    """
    path = folder / "modules.json"
    if not has_file(path):
        return None
    listed = parse_value(read_file(path, MAX_JSON_BYTES), path)
    found: dict[str, str] = {}
    for one in listed if isinstance(listed, list) else [None]:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise CheckpointError(f"{path}: {shown(one)} is no module", remedy=AGAIN)
        found[kind.rpartition(".")[2]] = place
    for kind in found.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModelError(f"{path}: the module {shown(kind)} is not implemented")
    place = found.get("Pooling", "1_Pooling")
    if found.get("Transformer") != "" or not _FOLDER.fullmatch(place):
        raise UnsupportedModelError(f"{path}: modules in other folders are not implemented")
    if os.path.islink(folder / place):
        raise CheckpointError(f"{folder / place} is a link", remedy="put the folder in its place")
    return found


def _pooling(folder: Path) -> Pooling:
    """Read how vectors are pooled. Raises UnsupportedModelError for another way."""
    config = read_json(folder / "config.json")
    modes = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
    if len(modes) != 1 or modes[0] not in _FLAGS:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: pooling by {shown(modes)} is not implemented",
            remedy=f"there are {', '.join(_FLAGS)}, one at a time",
        )
    return _FLAGS[modes[0]]
