"""Find the models on this machine: checkpoint folders by path, replicas by id.

Knows which folder a path or an id means here. Blocks on the disk: to be called on one thread for
that. Must not know other nodes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import TensorFiles, TensorPart, part_of
from shardnet.cluster.store.digest_cache import DigestCache
from shardnet.cluster.store.identify_apart import identify_guarded
from shardnet.cluster.store.model_cache import ModelCache, ModelUse
from shardnet.errors import CheckpointError
from shardnet.runtime.loading.model_facts import ModelFacts, find_folder, stamp


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
