"""A checkpoint on disk: its config, its tensors' headers, and the tensors, read one by one.

Knows safetensors files, single and indexed, whole or a replica that lacks tensors. Must not know
layers or kernels. Opening reads headers only and imports no torch; `read` does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardnet.errors import CheckpointError
from shardnet.model.config import ModelConfig
from shardnet.model.families import parse_config
from shardnet.model.replica_journal import Journal, n_parts

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""Cap on one file's header before memory is taken for it; safetensors has the same."""

SAMPLE_BYTES = 64
"""Bytes of every tensor that tell one training from another."""

_SINGLE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "fetch the checkpoint again"
_MAX_JSON_BYTES = 100_000_000

_DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2}
_DTYPE_BYTES |= {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}

ID_FILES = (
    "config.json",
    "generation_config.json",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor as its file's header describes it. `dtype` is safetensors' name: F32, BF16, …

    `offset` is where its bytes begin in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHead:
    """A file of a checkpoint, and how many of its first bytes are no tensors."""

    name: str
    size_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorFile:
    """One safetensors file: the raw header, which is part of the model's id, and its tensors."""

    name: str
    size_bytes: int
    header: bytes
    tensors: dict[str, TensorInfo]


class Checkpoint:
    """An open checkpoint. Reads are memory-mapped and counted; `close` unmaps.

    `config` is what config.json says, `tensors` every tensor by name. `journal` says which of them
    a replica holds, None where all are here.
    """

    def __init__(self, path: Path, config: ModelConfig, files: Mapping[str, _TensorFile]) -> None:
        self.path = path
        self.config = config
        self.journal = Journal.find(path)
        self._files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: info for file in files.values() for name, info in file.tensors.items()}
        )
        self._bytes_read = dict.fromkeys(files, 0)
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config.json and the headers of the tensor files in the folder `path`.

        Raises CheckpointError, which names the file, when one is missing, truncated or damaged;
        UnsupportedModelError for a model that is not implemented.
        """
        folder = Path(path)
        if not os.path.isdir(folder):  # also where a part of the path may not be looked at
            raise CheckpointError(f"{folder}: no such checkpoint folder; check the path of --model")
        config = parse_config(_read_json(folder / "config.json"), str(folder / "config.json"))
        if (folder / _SINGLE).exists():
            return cls(folder, config, {_SINGLE: _read_header(folder / _SINGLE)})
        if (folder / INDEX_FILE).exists():
            return cls(folder, config, _indexed_files(folder))
        raise CheckpointError(
            f"{folder}: neither {_SINGLE} nor {INDEX_FILE} is here; "
            "convert the checkpoint to safetensors or fetch it again"
        )

    @cached_property
    def model_id(self) -> str:
        """SHA-256 over config, tokenizer files and every tensor file's header and size, in hex."""
        digest = hashlib.sha256()
        for name in ID_FILES:
            if (self.path / name).is_file():
                _feed(digest, name, _read_file(self.path / name))
        for name in sorted(self._files):
            file = self._files[name]
            _feed(digest, name, file.header + file.size_bytes.to_bytes(8, "little"))
        return digest.hexdigest()

    @cached_property
    def sample(self) -> str:
        """SHA-256 over some bytes from the middle of every tensor, in hex.

        Two trainings of one shape have one id and differ here. Raises CheckpointError when a file
        cannot be read.
        """
        digest = hashlib.sha256()
        for name in sorted(self._files):
            infos = sorted(self._files[name].tensors.values(), key=lambda info: info.offset)
            try:
                with (self.path / name).open("rb") as file:
                    for info in infos:
                        file.seek(info.offset + max(0, info.size_bytes - SAMPLE_BYTES) // 2)
                        digest.update(file.read(min(SAMPLE_BYTES, info.size_bytes)))
            except OSError as error:
                raise CheckpointError(f"{self.path / name}: {error.strerror}; {_AGAIN}") from error
        return digest.hexdigest()

    def skeleton(self) -> tuple[FileHead, ...]:
        """Name the files that make the checkpoint: what it is without its tensors.

        Raises CheckpointError when they cannot be looked at.
        """
        names = [*ID_FILES, *([] if _SINGLE in self._files else [INDEX_FILE])]
        try:
            sizes = {n: (self.path / n).stat().st_size for n in names if (self.path / n).is_file()}
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}; {_AGAIN}") from error
        whole = [FileHead(name=n, size_bytes=size, head_bytes=size) for n, size in sizes.items()]
        return (
            *whole,
            *(
                FileHead(name=f.name, size_bytes=f.size_bytes, head_bytes=8 + len(f.header))
                for f in self._files.values()
            ),
        )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Of these tensors, name those that a replica does not hold."""
        return [name for name in names if not self._is_here(self.tensors[name])]

    def _is_here(self, info: TensorInfo) -> bool:
        held = self.journal.digests.get(info.name, {}) if self.journal is not None else None
        return held is None or len(held) == n_parts(info.size_bytes)

    @property
    def bytes_read(self) -> Mapping[str, int]:
        """Tensor bytes that `read` handed out so far, by file."""
        return MappingProxyType(self._bytes_read)

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor into memory: a CPU view of the file, in the file's dtype.

        Do not write to it. The pages stay mapped until the tensor is dropped and `release` was
        called. Raises CheckpointError when the tensor is missing or its file is damaged.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; {_AGAIN}")
        if not self._is_here(info):
            raise CheckpointError(
                f"{self.path}: tensor {name} has not been fetched from another node yet; ask again"
            )
        from safetensors import SafetensorError, safe_open

        try:
            if info.file not in self._handles:
                where = str(self.path / info.file)
                self._handles[info.file] = safe_open(where, framework="pt", device="cpu")
            tensor: torch.Tensor = self._handles[info.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path / info.file}: tensor {name} cannot be read ({error}); {_AGAIN}"
            ) from error
        self._bytes_read[info.file] += info.size_bytes
        return tensor

    def release(self) -> None:
        """Let go of the mapped files; tensors still held keep theirs. `read` maps them again."""
        self._handles.clear()

    def close(self) -> None:
        """Let go of the files. Reading afterwards opens them again."""
        self.release()


def _feed(digest: hashlib._Hash, name: str, content: bytes) -> None:
    """Add a named part; lengths go first, so that no two lists of parts look alike."""
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _indexed_files(folder: Path) -> dict[str, _TensorFile]:
    """Read the headers of all files in the index; keep the tensors it places in each."""
    where = folder / INDEX_FILE
    weight_map = _read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map is missing or empty; {_AGAIN}")
    placed: dict[str, dict[str, TensorInfo]] = {}
    files: dict[str, _TensorFile] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{where}: tensor {name} is in {file!r}, which is no file name")
        if file not in files:
            files[file] = _read_header(folder / file)
        if name not in files[file].tensors:
            raise CheckpointError(f"{folder / file}: tensor {name} is missing; {_AGAIN}")
        placed.setdefault(file, {})[name] = files[file].tensors[name]
    return {
        file: _TensorFile(
            name=file, size_bytes=whole.size_bytes, header=whole.header, tensors=placed[file]
        )
        for file, whole in files.items()
    }


def _read_header(path: Path) -> _TensorFile:
    """Read and check the header of one safetensors file (github.com/huggingface/safetensors)."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
                raise CheckpointError(
                    f"{path}: truncated or no safetensors file ({size_bytes} bytes, "
                    f"header claims {length}); {_AGAIN}"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {_AGAIN}") from error
    entries = _parse_object(header, path)
    entries.pop("__metadata__", None)
    tensors = {}
    end = 0
    for name, entry in entries.items():
        tensors[name], stop = _tensor_info(name, entry, path, data_start=8 + length)
        end = max(end, stop)
    if 8 + length + end != size_bytes:
        raise CheckpointError(
            f"{path}: {size_bytes} bytes long, its header describes {8 + length + end}: "
            f"truncated or damaged; {_AGAIN}"
        )
    return _TensorFile(name=path.name, size_bytes=size_bytes, header=header, tensors=tensors)


def _tensor_info(name: str, entry: object, path: Path, data_start: int) -> tuple[TensorInfo, int]:
    """Check one header entry; return it and where its bytes end."""
    match entry:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "data_offsets": [int(begin), int(stop)],
        } if all(isinstance(n, int) and n >= 0 for n in shape):
            size_bytes = math.prod(shape) * _DTYPE_BYTES.get(dtype, 0)
            if 0 <= begin <= stop and (dtype not in _DTYPE_BYTES or stop - begin == size_bytes):
                info = TensorInfo(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    size_bytes=stop - begin,
                    file=path.name,
                    offset=data_start + begin,
                )
                return info, stop
    raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged; {_AGAIN}")


def _read_json(path: Path) -> dict[str, Any]:
    return _parse_object(_read_file(path), path)


def _read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES} bytes; {_AGAIN}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {_AGAIN}") from error


def _parse_object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; {_AGAIN}")
    return value
