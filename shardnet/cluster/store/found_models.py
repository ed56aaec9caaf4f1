"""Find all models on this machine: in the Hub's cache, our own, Ollama's and LM Studio's stores.

Knows where each store is, and that one which hangs or may not be read keeps no other from being
listed. Opens no model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.checkpoint.hub_cache import cache_root, pulled_models
from shardnet.checkpoint.model_folders import (
    lm_studio_models,
    lm_studio_roots,
    models_below,
    named_folders,
)
from shardnet.checkpoint.model_names import FoundModel
from shardnet.checkpoint.ollama_store import ollama_models, ollama_roots
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import ShardnetError

OWN_STORE: Final = "shardnet"
REPLICA_STORE: Final = "other nodes"
MAX_FOUND: Final = 8192
"""Models that are listed of one machine."""

Scan = Callable[[Path], Iterable[FoundModel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model of this machine. `held_bytes` is what of a replica is here, None for a whole one."""

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
        *((root, ollama_models) for root in ollama_roots()),
        *((root, lm_studio_models) for root in lm_studio_roots()),
    ]
    named = [(folder, models_below) for folder in named_folders()]
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
    """Add when a model's folder or file last changed, if it is there. Blocks."""
    try:
        return replace(model, modified_s=max(0, int(os.stat(model.path).st_mtime)))
    except OSError:
        return model


async def _replicas(disk: DiskJobs, cache: ModelCache) -> list[HeldModel]:
    """List what came from other nodes under some name."""

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
