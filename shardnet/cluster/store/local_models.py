"""Find the models on this machine: checkpoint folders by path, replicas by id.

Knows which folder a path or an id means here. Blocks on the disk: to be called on one thread for
that. Must not know other nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import TensorFiles, TensorPart, part_of
from shardnet.checkpoint.replica_journal import FileStamp
from shardnet.cluster.store.identify_apart import identify_guarded
from shardnet.cluster.store.model_cache import ModelCache, ModelUse
from shardnet.errors import CheckpointError
from shardnet.files import make_own_folder, open_own, read_own
from shardnet.runtime.loading.model_facts import ModelFacts, find_folder, stamp

MAX_BYTES = 1 << 28
"""Largest cache file that is read: a million parts."""


class DigestCache:
    """SHA-256 of parts, in hex. An entry is valid while its file has the same stamp."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], tuple[str, FileStamp]] = {}
        with contextlib.suppress(OSError):
            for line in read_own(path, MAX_BYTES).split(b"\n"):
                self._take(line)

    @classmethod
    def for_checkpoint(cls, cache: Path, folder: Path) -> DigestCache:
        """Open the digests of the checkpoint `folder`, stored below the folder `cache`."""
        name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
        return cls(cache / "digests" / f"{name[:32]}.jsonl")

    def digest(self, part: TensorPart, files: TensorFiles) -> str:
        """Return the digest of a part, computed from `files` unless it is cached.

        Raises CheckpointError if the part cannot be read. A digest that cannot be stored is no
        error: it is computed again.
        """
        stamp = files.stamp(part.file)
        known = self._known.get((part.tensor, part.number))
        if known is not None and known[1] == stamp:
            return known[0]
        sha256 = files.digest(part)
        if files.stamp(part.file) == stamp:
            self._put(part, sha256, stamp)
        return sha256

    def _put(self, part: TensorPart, sha256: str, stamp: FileStamp) -> None:
        entry = {"tensor": part.tensor, "part": part.number, "sha256": sha256, "stamp": stamp}
        line = b"\n" + json.dumps(entry).encode()
        self._take(line)
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_own(self._path, flags), "ab", buffering=0) as file:
                file.write(line)

    def _take(self, line: bytes) -> None:
        """Apply one line; skip an unfinished one."""
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case {
                    "tensor": str(tensor),
                    "part": int(part),
                    "sha256": str(sha256),
                    "stamp": [int(size), int(time_ns)],
                }:
                    self._known[tensor, part] = (sha256, (size, time_ns))


class LocalModels:
    """The models of this machine, replicas in `cache` included."""

    def __init__(self, cache: ModelCache) -> None:
        self._cache = cache
        self._facts: dict[Path, ModelFacts] = {}

    def at(self, model: str) -> ModelFacts | None:
        """Inspect the checkpoint at the path `model`, else the replica last used for that path.

        None if there is neither. Raises CheckpointError if the folder is damaged.
        """
        folder = find_folder(model)
        if folder is None:
            model_id = self._cache.recall(model)
            folder = self._cache.find(model_id) if model_id is not None else None
            facts = self.inspect(folder) if folder is not None else None
            # A replica of an earlier release lacks bytes that the id covers today.
            return facts if facts is not None and facts.model_id == model_id else None
        return self.inspect(folder)

    def by_id(self, model_id: str) -> ModelFacts | None:
        """Find a model by its id: a checkpoint folder inspected before, else a replica."""
        for facts in [*self._facts.values()]:
            if facts.model_id == model_id and facts.is_complete and os.path.exists(facts.path):
                now = self.inspect(facts.path)
                if now.model_id == model_id:
                    return now
        folder = self._cache.find(model_id)
        return self.inspect(folder) if folder is not None else None

    def open(self, model_id: str) -> OpenModel:
        """Open a model to read parts of it. Raises CheckpointError if it is not on this machine."""
        facts = self.by_id(model_id)
        if facts is None:
            raise CheckpointError(
                f"model {model_id[:12]} is not here any more", remedy="ask another node"
            )
        if facts.is_complete:
            digests = DigestCache.for_checkpoint(self._cache.folder, facts.path)
            return OpenModel(facts.path, digests=digests)
        with contextlib.ExitStack() as unless_it_opens:
            use = self._cache.use(model_id)
            unless_it_opens.callback(use.close)
            opened = OpenModel(facts.path, use=use)
            unless_it_opens.pop_all()
        return opened

    def inspect(self, folder: Path) -> ModelFacts:
        """Identify the model in a folder; cached until the folder changes."""
        known = self._facts.get(folder)
        if known is None or known.stamp != stamp(folder):
            known = self._facts[folder] = identify_guarded(folder)
        return known


class OpenModel:
    """A model opened for reading: a folder with cached `digests`, or a replica in `use`."""

    def __init__(
        self, folder: Path, *, digests: DigestCache | None = None, use: ModelUse | None = None
    ) -> None:
        self._digests = digests
        self._use = use
        self.checkpoint = Checkpoint.open(folder, ignore_unknown=True)
        self.files = TensorFiles(self.checkpoint.folder)

    def part(self, tensor: str, number: int) -> TensorPart:
        """Locate part `number` of a tensor. Raises CheckpointError if it is not stored here."""
        part = part_of(self.checkpoint, tensor, number)
        if not self._has(part):
            raise CheckpointError(f"{part} of model {self.checkpoint.model_id[:12]} is not here")
        return part

    def digest(self, tensor: str, number: int) -> str | None:
        """Return the SHA-256 of part `number` of a tensor in hex, None if it is not stored here.

        Raises CheckpointError if the model has no such part, or it cannot be read.
        """
        part = part_of(self.checkpoint, tensor, number)
        if self._digests is not None:
            return self._digests.digest(part, self.files)
        return self._journalled(part)

    def close(self) -> None:
        """Close the files, and allow the replica to be deleted."""
        self.files.close()
        if self._use is not None:
            self._use.close()

    def _has(self, part: TensorPart) -> bool:
        return self.checkpoint.journal is None or self._journalled(part) is not None

    def _journalled(self, part: TensorPart) -> str | None:
        journal = self.checkpoint.journal
        return journal.digests.get(part.tensor, {}).get(part.number) if journal else None
