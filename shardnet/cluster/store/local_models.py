"""Find the models on this machine, in any store, and identify them by their headers.

Large headers are read in a helper process: a hundred thousand of them take seconds of Python, which
would stall the streams of this process. All but `find_models` block on the disk: call them on one
thread for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.checkpoint import program_stores
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.gguf_header import gguf_files
from shardnet.checkpoint.hub_cache import cache_root, pulled_models
from shardnet.checkpoint.model_names import FoundModel
from shardnet.checkpoint.replica import TensorFiles, TensorPart, part_of, table_tensors
from shardnet.checkpoint.replica_journal import JOURNAL_FILE, FileStamp
from shardnet.checkpoint.tensors.checkpoint_files import find_file, folder_entries, open_file
from shardnet.checkpoint.tensors.manifest import is_blob
from shardnet.checkpoint.tensors.stored_tensor import AGAIN, StoredTensor
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.model_cache import ModelCache, ModelUse
from shardnet.errors import CheckpointError, ShardnetError, UnsupportedModelError
from shardnet.files import make_own_folder, open_own, read_own
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.model_facts import ModelFacts, Stamp, find_folder, identify, stamp
from shardnet.threads import DaemonThreads
from shardnet.types import LayerRange

OWN_STORE: Final = "shardnet"
REPLICA_STORE: Final = "other nodes"
MAX_FOUND: Final = 8192
"""Most models listed of one machine."""

Scan = Callable[[Path], Iterable[FoundModel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model of this machine. `held_bytes` is how much of a replica is here, None for a complete
    checkpoint.
    """

    found: FoundModel
    held_bytes: int | None = None
    whole_bytes: int = 0


async def find_models(disk: DiskJobs, cache: ModelCache) -> list[HeldModel]:
    """List the models of this machine, the bundled one first, each name once.

    A store that cannot be read is listed by its path, with the reason.
    """
    own = FoundModel(name=DEFAULT_MODEL_NAME, store=OWN_STORE, path=DEFAULT_MODEL_PATH)
    scans: list[tuple[Path, Scan]] = [
        (own.path, lambda root: [own]),
        (cache_root(), pulled_models),
        *((root, program_stores.ollama_models) for root in program_stores.ollama_roots()),
        *((root, program_stores.lm_studio_models) for root in program_stores.lm_studio_roots()),
    ]
    named = [(folder, program_stores.models_below) for folder in program_stores.named_folders()]
    lists = await asyncio.gather(
        *(_scan(disk, root, scan) for root, scan in scans),
        *(_scan(disk, folder, scan, must_exist=True) for folder, scan in named),
    )
    found = [HeldModel(found=model) for listed in lists for model in listed]
    by_name: dict[str, HeldModel] = {}
    for held in found + await _replicas(disk, cache):
        by_name.setdefault(held.found.name, held)
    return list(by_name.values())[:MAX_FOUND]


async def _scan(
    disk: DiskJobs, root: Path, scan: Scan, *, must_exist: bool = False
) -> list[FoundModel]:
    """List one store; nothing if it is not there, unless it `must_exist`."""

    def job() -> list[FoundModel]:
        try:
            os.stat(root)
        except (FileNotFoundError, NotADirectoryError):
            if must_exist:
                raise
            return []
        return [dated(model) for model in scan(root)]

    try:
        return await disk.run(root, job)
    except OSError as error:
        failure = error.strerror or str(error)
    except ShardnetError as error:
        failure = str(error)
    return [FoundModel(name=str(root), store=OWN_STORE, path=root, failure=failure)]


def dated(model: FoundModel) -> FoundModel:
    """Set when a model's folder or file was last changed, if it exists. Blocks."""
    try:
        return replace(model, modified_s=max(0, int(os.stat(model.path).st_mtime)))
    except OSError:
        return model


async def _replicas(disk: DiskJobs, cache: ModelCache) -> list[HeldModel]:
    """List the replicas of models of other nodes that have a name."""

    def job() -> list[HeldModel]:
        return [
            HeldModel(
                found=dated(FoundModel(name=cached.name, store=REPLICA_STORE, path=folder)),
                held_bytes=cached.size_bytes,
                whole_bytes=cached.whole_bytes,
            )
            for cached in cache.models()
            if cached.name and (folder := cache.find(cached.model_id)) is not None
        ]

    try:
        return await disk.run(cache.folder, partial(job))
    except ShardnetError:
        return []  # `shardnet cache ls` says why


LARGE_BYTES: Final = 1 << 20
"""Larger headers are read in a helper process."""
LIMITS: Final = JobLimits(cpu_s=60, wall_s=300.0, memory_bytes=2 << 30, reply_bytes=64 << 20)

_MODULE = "shardnet.cluster.store.identify_program"
_POLL_S = 0.5
"""Seconds between polls: few, so that disk_jobs.py does not take the thread for a stuck one."""


def identify_guarded(path: Path) -> ModelFacts:
    """Identify a checkpoint here, or in a helper process if its headers are large.

    Raises what `identify` raises, CheckpointError too for headers that take too long or too much
    memory.
    """
    return identify(path) if header_bytes(path) <= LARGE_BYTES else identify_apart(path)


def identify_apart(path: Path) -> ModelFacts:
    """Identify a checkpoint in a helper process; raises as `identify_guarded`."""
    process, threads = HelperProcess(_MODULE), DaemonThreads(1, "shardnet-identify")
    try:
        asked = threads.submit(process.call, "identify", {"path": str(path)}, LIMITS)
        while not asked.done():
            with contextlib.suppress(TimeoutError):
                asked.exception(_POLL_S)
        value, _ = asked.result()
    except JobFailedError as error:
        raise CheckpointError(
            f"{path}: reading its headers failed: {error}", remedy=AGAIN
        ) from error
    finally:
        process.close()
        threads.close()
    return _facts(path, value)


def header_bytes(path: Path) -> int:
    """Return how many bytes of headers a checkpoint has at most, as far as its files tell."""
    try:
        if not path.is_dir():
            return sum(_size_bytes(file) for file in gguf_files(path))
        return sum(_header_bytes(path / name) for name in folder_entries(path))
    except (OSError, CheckpointError):
        return 0  # opening it says what is wrong


def _header_bytes(file: Path) -> int:
    if file.name.endswith((".gguf", ".bin", ".pth", ".index.json")) or is_blob(file.name):
        return _size_bytes(file)
    if file.name.endswith(".safetensors"):
        with open_file(file) as opened:
            return int.from_bytes(opened.read(8), "little")
    return 0


def _size_bytes(file: Path) -> int:
    status = find_file(file)
    return status.st_size if status is not None else 0


def _facts(path: Path, value: dict[str, Any]) -> ModelFacts:
    types = get_type_hints(ModelFacts)
    told = {name: msgspec.convert(of, types[name]) for name, of in value.items()}
    config = parse_config(json.loads(told["config_text"]), str(path), [])
    return ModelFacts(path=path, config=config, **told)


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
        self._facts: dict[Path, tuple[Stamp, ModelFacts]] = {}
        """By folder: its facts, and its `_state` from before they were read."""

    def at(self, model: str) -> ModelFacts | None:
        """Inspect the checkpoint at the path `model`, else the replica last used for that path.

        None if there is neither. Raises CheckpointError if the folder is damaged.
        """
        folder = find_folder(model)
        if folder is not None:
            return self.inspect(folder)
        model_id = self._cache.recall(model)
        return self.replica(model_id) if model_id is not None else None

    def by_id(self, model_id: str) -> ModelFacts | None:
        """Find a model by its id: a checkpoint folder inspected before, else a replica."""
        for _, facts in [*self._facts.values()]:
            if facts.model_id == model_id and facts.is_complete and os.path.exists(facts.path):
                now = self.inspect(facts.path)
                if now.model_id == model_id:
                    return now
        return self.replica(model_id)

    def replica(self, model_id: str) -> ModelFacts | None:
        """Inspect the replica of a model; None if there is none that can be used.

        Unusable are those without headers, after a power cut, and those of earlier releases, which
        lack bytes that the id covers today.
        """
        folder = self._cache.find(model_id)
        if folder is None:
            return None
        try:
            facts = self.inspect(folder)
        except UnsupportedModelError:
            raise
        except CheckpointError as error:
            cause = error.__cause__
            is_lost = isinstance(cause, FileNotFoundError)
            if isinstance(cause, OSError | JobFailedError) and not is_lost:
                raise  # a later attempt may succeed
            return None
        return facts if facts.model_id == model_id else None

    def install(self, staged: Path, model_id: str) -> Path:
        """Move a staged replica to its place, as ModelCache.install.

        An unusable replica in that place is deleted first.
        """
        if self.replica(model_id) is None:
            self._cache.discard(model_id)
        return self._cache.install(staged, model_id)

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
        state, known = _state(folder), self._facts.get(folder)
        if known is None or known[0] != state:
            known = self._facts[folder] = state, identify_guarded(folder)
        return known[1]


def _state(folder: Path) -> Stamp:
    """Return a stamp that changes whenever ModelFacts may; for a replica, also with each new part.

    Raises CheckpointError as `stamp`.
    """
    with contextlib.suppress(OSError):
        journal = find_file(folder / JOURNAL_FILE)
        if journal is not None:
            return ((JOURNAL_FILE, journal.st_size, journal.st_mtime_ns),)
    return stamp(folder)


class OpenModel:
    """A model opened for reading: a folder with cached `digests`, or a replica in `use`."""

    def __init__(
        self, folder: Path, *, digests: DigestCache | None = None, use: ModelUse | None = None
    ) -> None:
        self._digests = digests
        self._use = use
        self.checkpoint = Checkpoint.open(folder, ignore_unknown_config=True)
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

    def rows(self, tensor: str, numbers: Sequence[int]) -> list[tuple[str, int, int]]:
        """Locate rows of a table that is looked up in: (file, offset, bytes) each.

        Raises CheckpointError if it is none, has not so many, or is not stored here.
        """
        info = self._tables.get(tensor)
        what = f"tensor {tensor} of model {self.checkpoint.model_id[:12]}"
        if info is None:
            raise CheckpointError(f"{what} is no table in which rows are looked up")
        if self.checkpoint.missing([tensor]):
            raise CheckpointError(f"{what} is not here")
        n_bytes = info.size_bytes // info.shape[0]
        if max(numbers, default=0) >= info.shape[0]:
            raise CheckpointError(f"{what} has {info.shape[0]} rows, and no {max(numbers)}")
        return [(info.file, info.offset + number * n_bytes, n_bytes) for number in numbers]

    @cached_property
    def _tables(self) -> dict[str, StoredTensor]:
        return table_tensors(self.checkpoint, LayerRange(0, self.checkpoint.config.n_layers))

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
