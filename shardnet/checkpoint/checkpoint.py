"""A checkpoint on disk: its config, its tensors' headers, and the tensors, read one by one.

Knows what all formats have in common, and replicas, which lack tensors; each format has a module of
its own. Must not know layers or kernels. Opening reads headers only and imports no
torch; `read` does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardnet.checkpoint.formats.consolidated import has_consolidated_files, open_consolidated
from shardnet.checkpoint.formats.gguf import open_gguf
from shardnet.checkpoint.formats.gguf_header import gguf_files, is_gguf
from shardnet.checkpoint.formats.huggingface import has_huggingface_tensors, open_huggingface
from shardnet.checkpoint.replica_journal import Journal, n_parts
from shardnet.checkpoint.tensors.checkpoint_files import find_file, has_file
from shardnet.checkpoint.tensors.json_files import read_file
from shardnet.checkpoint.tensors.manifest import Contents, merged, sample_range, sampled_tensors
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import (
    ByteRange,
    FileHead,
    FileState,
    StoredTensor,
    TensorFile,
    check_unchanged,
    damaged,
    hash_ranges,
    prefetch_stored,
    read_stored,
)
from shardnet.errors import CheckpointError, UsageError
from shardnet.model.config.fields import unknown_keys_error
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of, parse_config
from shardnet.model.families.stage_tensors import mtp_tensors

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """An open checkpoint: its config and headers. Reads are counted.

    `path` was opened, `folder` has its files. `config` is the model's, `tensors` are its parameters
    by the names of the family's table, each made of some of the `stored` ones. `journal` lists
    those that a replica has, None if the checkpoint is whole.
    """

    def __init__(
        self, path: Path, contents: Contents, *, ignore_unknown_config: bool = False
    ) -> None:
        self.path = path
        self.folder = contents.folder
        unknown = [*contents.unknown_keys]
        self.config: ModelConfig = parse_config(contents.config, contents.where, unknown)
        if unknown and not ignore_unknown_config:
            raise unknown_keys_error(contents.where, unknown)
        self.unknown_keys = tuple(unknown)
        """Keys of the config that may change what is computed and are ignored, with values."""
        self.config_text = json.dumps(contents.config)
        """The content of config.json, or its equivalent in formats without one."""
        self.journal = Journal.find(path) if path.is_dir() else None
        self.is_part = False
        """Whether the parameters are not those of `config`: see `beside`."""
        self._files = contents.files
        self._opened = {name: FileState.of(self.folder / name) for name in contents.files}
        self._form = contents.form
        self._whole = contents.whole
        self.stored: Mapping[str, StoredTensor] = MappingProxyType(
            {name: info for file in contents.files.values() for name, info in file.tensors.items()}
        )
        # What predicts further tokens has its names, whether it will be used or not.
        self._ahead = replace(self.config, has_mtp=family_of(self.config).mtp is not None)
        self.tensors: Mapping[str, ModelTensor] = MappingProxyType(
            dict(contents.arrange(self._ahead))
        )
        self._bytes_read = dict.fromkeys(contents.files, 0)

    @classmethod
    def open(cls, path: str | Path, *, ignore_unknown_config: bool = False) -> Checkpoint:
        """Read the config and the headers of the tensor files at `path`.

        That is a folder, or a GGUF file. Unknown keys of the config are refused, all named at once,
        unless `ignore_unknown_config`: so for whoever computes nothing, or was told to.
        Raises CheckpointError, which names the file, when one is missing, truncated or damaged;
        UnsupportedModelError for a model that is not implemented.
        """
        path = Path(path)
        if not names_checkpoint(path):
            raise CheckpointError(
                f"{path}: no such checkpoint folder", remedy="check the path of --model"
            )
        return cls(path, _read_contents(path), ignore_unknown_config=ignore_unknown_config)

    @property
    def has_mtp(self) -> bool:
        """Whether it has a layer that predicts a further token, of a family where one is known."""
        return self._ahead.has_mtp and mtp_tensors(self._ahead).keys() <= self.tensors.keys()

    def use_mtp(self) -> None:
        """Count that layer to the model from now on. Raises UsageError where there is none."""
        if not self.has_mtp:
            raise no_mtp()
        self.config = self._ahead

    @cached_property
    def model_id(self) -> str:
        """SHA-256 in hex: config, tokenizer, every tensor file's header and size, sampled weights.

        Docs/protocol.md section 16 has the bytes. At most 4 MiB of tensors are read, however large
        the checkpoint is. Raises CheckpointError, which names the file, if one cannot be read.
        """
        digest = hashlib.sha256()
        for name in self._whole:
            if has_file(self.folder / name):
                _feed(digest, name, read_file(self.folder / name))
        for name in sorted(self._files):
            file = self._files[name]
            size = file.size_bytes.to_bytes(8, "little")
            _feed(digest, name, file.sha256.encode() + size + self.sample_digests[name].encode())
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        """The size of all tensor files."""
        return sum(file.size_bytes for file in self._files.values())

    @property
    def form(self) -> str:
        """How the weights are stored, in the words of their makers: Q4_K_M, BF16, GPTQ 4-bit."""
        n_bytes: Counter[str] = Counter()
        for info in self.stored.values():
            n_bytes[info.dtype] += info.size_bytes
        return self._form or max(n_bytes, key=lambda dtype: n_bytes[dtype], default="")

    @cached_property
    def samples(self) -> Mapping[str, tuple[ByteRange, ...]]:
        """The bytes of tensors that are part of the id, by file, in the order they are hashed."""
        samples: dict[str, list[ByteRange]] = {name: [] for name in self._files}
        for info in sampled_tensors(self.stored.values()):
            samples[info.file].append(sample_range(info))
        return MappingProxyType({name: tuple(ranges) for name, ranges in samples.items()})

    @cached_property
    def sample_digests(self) -> Mapping[str, str]:
        """SHA-256 of every tensor file's sampled bytes, in hex; of a replica, as when it was begun.

        Thus a damaged part of a replica, which its digest reveals, does not change the model's id.
        Raises CheckpointError if a file cannot be read.
        """
        noted = self.journal.samples if self.journal is not None else {}
        return {name: noted.get(name) or self._sample_of(name) for name in self._files}

    def _sample_of(self, name: str) -> str:
        try:
            return hash_ranges(self.folder / name, self.samples[name])
        except OSError as error:
            raise damaged(f"{self.folder / name}: {error.strerror}") from error

    def skeleton(self) -> tuple[FileHead, ...]:
        """List the files that make the checkpoint, each with the byte ranges that its id covers.

        Those are all bytes outside tensors, and the samples of the tensors: they suffice to compute
        the id. Raises CheckpointError if a file cannot be read.
        """
        try:
            found = {name: find_file(self.folder / name) for name in self._whole}
        except OSError as error:
            raise damaged(f"{self.path}: {error.strerror}") from error
        whole = [
            FileHead(name=name, size_bytes=status.st_size, ranges=((0, status.st_size),))
            for name, status in found.items()
            if status is not None
        ]
        return (
            *whole,
            *(
                FileHead(
                    name=file.name,
                    size_bytes=file.size_bytes,
                    ranges=merged((*file.heads, *self.samples[file.name])),
                )
                for file in self._files.values()
            ),
        )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the stored tensors `names` that a replica lacks."""
        return [name for name in names if not self._is_here(self.stored[name])]

    def _is_here(self, info: StoredTensor) -> bool:
        held = self.journal.digests.get(info.name, {}) if self.journal is not None else None
        return held is None or len(held) == n_parts(info.size_bytes)

    def with_tensors(self, tensors: dict[str, ModelTensor]) -> Checkpoint:
        """Return the same with these parameters in place of its own, also those yet to be added."""
        other = copy(self)
        other.tensors = ChainMap(tensors, dict(self.tensors))
        return other

    def beside(
        self, folder: Path, files: Mapping[str, TensorFile], tensors: dict[str, ModelTensor]
    ) -> Checkpoint:
        """Return one whose parameters are in `files` of their own, in place of its own ones."""
        other = copy(self)
        other.folder, other.journal = folder, None
        other.is_part = True
        other._files = files
        other._opened = {name: FileState.of(folder / name) for name in files}
        other._bytes_read = dict.fromkeys(files, 0)
        other.stored = {name: one for file in files.values() for name, one in file.tensors.items()}
        other.tensors = tensors
        return other

    @property
    def bytes_read(self) -> Mapping[str, int]:
        """Stored bytes that `read` has used so far, by file."""
        return MappingProxyType(self._bytes_read)

    def prefetch(self, name: str, n_bytes: int) -> None:
        """Prefetch at most `n_bytes` of the stored tensors that parameter `name` is made of."""
        for source in self.tensors[name].sources:
            if n_bytes > 0:
                prefetch_stored(self.folder, source, n_bytes)
                n_bytes -= source.size_bytes

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        came: Callable[[int], None] = lambda n_bytes: None,
    ) -> torch.Tensor:
        """Read one parameter into a CPU tensor of the shape in the family's table.

        If it is stored without any conversion, it is in the file's dtype. Computed values are in
        `dtype`, by default float32. `came` is called with each number of stored bytes read from the
        disk; if it raises, reading ends. Raises CheckpointError if the tensor is missing, or its
        file is damaged or no longer what was opened.
        """
        tensor = self._tensor(name)
        import torch

        return tensor.make(self._read(tensor, came), dtype or torch.float32)

    def stored_of(
        self, name: str, came: Callable[[int], None] = lambda n_bytes: None
    ) -> list[torch.Tensor]:
        """Read the stored tensors that a parameter is made of; `came` and errors as of `read`."""
        return self._read(self._tensor(name), came)

    def sources_of(self, name: str) -> tuple[StoredTensor, ...]:
        """Return the stored tensors of a parameter, for a caller who reads their bytes.

        They count as read now. Raises CheckpointError as `read`.
        """
        tensor = self._tensor(name)
        for source in tensor.sources:
            check_unchanged(self.folder / source.file, self._opened[source.file])
        self._count(tensor)
        return tensor.sources

    def _tensor(self, name: str) -> ModelTensor:
        """Return a parameter, all of whose stored tensors are here."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise damaged(f"{self.path}: tensor {name} is missing")
        for lacking in self.missing(source.name for source in tensor.sources):
            raise CheckpointError(
                f"{self.path}: tensor {lacking} has not been fetched from another node yet",
                remedy="ask again",
            )
        return tensor

    def _read(self, tensor: ModelTensor, came: Callable[[int], None]) -> list[torch.Tensor]:
        stored = [
            read_stored(self.folder, source, self._opened[source.file], came)
            for source in tensor.sources
        ]
        self._count(tensor)
        return stored

    def _count(self, tensor: ModelTensor) -> None:
        for source in tensor.sources:
            self._bytes_read[source.file] += source.size_bytes


def no_mtp() -> UsageError:
    """Make the error for a checkpoint without a layer that predicts further tokens."""
    return UsageError(
        "--speculate mtp: the model has no layer that predicts further tokens (MTP), or none that "
        "is implemented",
        remedy="choose --speculate ngram, or leave --mtp out",
    )


def names_checkpoint(path: Path) -> bool:
    """Return whether `path` is a folder that is not empty, or a GGUF file, for `Checkpoint.open`.

    A folder with nothing but hidden files is no checkpoint: it may be a mount point without its
    disk, or the destination of a checkpoint.
    """
    # os.path, unlike Path, raises nothing if a part of the path may not be read.
    if os.path.isdir(path):
        return not _is_empty(path)
    return is_gguf(path)


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return all(entry.name.startswith(".") for entry in entries)
    except OSError:
        return False  # opening it reports why it cannot be read


def gguf_file(path: Path) -> Path | None:
    """Return the first file of the GGUF checkpoint at `path`, None for other formats.

    Raises CheckpointError as `gguf_files`.
    """
    if path.is_dir() and (has_huggingface_tensors(path) or has_consolidated_files(path)):
        return None
    files = gguf_files(path)
    return files[0] if files else None


def _read_contents(path: Path) -> Contents:
    """Read the headers in whichever format the checkpoint has."""
    if gguf_file(path) is not None:
        return open_gguf(path)
    if has_consolidated_files(path) and not has_huggingface_tensors(path):
        return open_consolidated(path)
    return open_huggingface(path)


def _feed(digest: hashlib._Hash, name: str, content: bytes) -> None:
    """Add a named part; lengths go first, so that different lists give different bytes."""
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
