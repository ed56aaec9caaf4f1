"""Pull some layers of a model from the Hub into the cache of replicas.

Knows how to read single tensors of files on the Hub by byte ranges; the result is a replica like
one fetched from nodes. Blocks: to be called on a thread that may wait. Must not know links.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.hub_cache import HubName, cache_root
from shardnet.checkpoint.replica import (
    Replica,
    TensorPart,
    begin_replica,
    check_heads,
    lay_out,
    range_tensors,
)
from shardnet.checkpoint.tensors.manifest import ID_FILES, INDEX_FILES, TENSOR_SUFFIXES
from shardnet.checkpoint.tensors.stored_tensor import FileHead
from shardnet.cluster.download.hub import Report, fetch_small, look_up, named_errors
from shardnet.cluster.download.hub_ranges import HubFile, HubRanges
from shardnet.cluster.store.local_models import LocalModels
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import CheckpointError
from shardnet.types import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledLayers:
    """Layers of a model in the cache. `n_new_bytes` were transferred in this call."""

    name: str
    commit: str
    model_id: str
    folder: Path
    layers: LayerRange
    n_new_bytes: int


def pull_layers(
    name: HubName, layers: LayerRange, report: Report, cache: ModelCache
) -> PulledLayers:
    """Download the tensors of a stage with `layers`, embedding and head included.

    Tensors that an interrupted download completed are kept. The Hub states no digests of single
    tensors: their integrity rests on the encrypted connection. Raises HubError as hub.pull;
    CheckpointError if the model is not supported or has no such layers, or if its tensors are not
    in safetensors; CapacityError if the cache has no room.
    """
    root = cache_root()
    with named_errors(name):
        commit, found = look_up(name, root)
        files = [file for file in found if _is_of_replica(file)]
        _refuse_other_formats(name, files)
        source = HubRanges(name, commit)
        folder, model_id = _replica(name, commit, files, source, cache, root)
        with (
            contextlib.closing(cache.use(model_id)),
            contextlib.closing(Replica(folder)) as replica,
        ):
            n_layers = replica.checkpoint.config.n_layers
            if layers.end > n_layers:
                raise CheckpointError(
                    f"{name} has {n_layers} layers, not all of {layers.words}",
                    remedy="check --layers: the end is not part of the range",
                )
            n_bytes = _fill(replica, layers, source, report, cache, model_id)
        cache.remember(str(name), model_id)
    return PulledLayers(
        name=str(name),
        commit=commit,
        model_id=model_id,
        folder=folder,
        layers=layers,
        n_new_bytes=n_bytes,
    )


def _is_of_replica(file: HubFile) -> bool:
    """Whether replicas have such a file: none of those that only encoders of texts have beside."""
    return file.name in (*ID_FILES, *INDEX_FILES) or file.name.endswith(TENSOR_SUFFIXES)


def _refuse_other_formats(name: HubName, files: Sequence[HubFile]) -> None:
    """Raise CheckpointError if tensors are in files other than safetensors."""
    for file in files:
        if file.name.endswith(TENSOR_SUFFIXES) and not file.name.endswith(".safetensors"):
            raise CheckpointError(
                f"{name}: --layers takes tensors out of safetensors files, and its weights are in "
                f"{file.name}",
                remedy="pull it without --layers",
            )


def _replica(
    name: HubName,
    commit: str,
    files: Sequence[HubFile],
    source: HubRanges,
    cache: ModelCache,
    root: Path,
) -> tuple[Path, str]:
    """Return the folder of the model's replica, created if need be, and the model's id."""
    whole = [f for f in files if not f.name.endswith(".safetensors")]
    heads = {f.name: fetch_small(name, commit, f, root) for f in whole}
    for file in files:
        if file.name not in heads:
            heads[file.name] = source.header(file)
    laid = [
        FileHead(name=f.name, size_bytes=f.size_bytes, ranges=((0, len(heads[f.name])),))
        for f in files
    ]
    check_heads(laid, "the Hub")
    with cache.staging() as staged:
        with contextlib.closing(lay_out(staged, laid)) as opened:
            for file_name, head in heads.items():
                opened.write(file_name, 0, memoryview(head))
            checkpoint = Checkpoint.open(staged, ignore_unknown_config=True)
            for file_name, offset, sample in source.samples(checkpoint.samples):
                opened.write(file_name, offset, memoryview(sample))
        model_id = checkpoint.model_id
        models = LocalModels(cache)
        found = models.replica(model_id)
        if found is not None:
            return found.path, model_id
        begin_replica(staged, model_id, "the Hub")
        return models.install(staged, model_id), model_id


def _fill(
    replica: Replica,
    layers: LayerRange,
    source: HubRanges,
    report: Report,
    cache: ModelCache,
    model_id: str,
) -> int:
    """Fetch the parts of these layers that a replica lacks; return the bytes fetched."""
    tensors = range_tensors(replica.checkpoint, layers)
    for part in replica.unverified(tensors):
        replica.check(part)
    parts = replica.parts(tensors)
    lacking = [part for part in parts if replica.digest(part) is None]
    total = sum(part.size_bytes for part in lacking)
    if total:
        cache.make_room(total, keep=model_id)
    done = 0
    try:
        for run in _runs(lacking):
            pieces = source.stream(run[0].file, run[0].offset, run[-1].offset + run[-1].size_bytes)
            for n_bytes in _take(run, pieces, replica):
                done += n_bytes
                report(run[0].file, done, total)
    finally:
        replica.seal({part.file for part in parts})
    return done


def _runs(parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
    """Group parts that are adjacent in one file."""
    runs: list[list[TensorPart]] = []
    for part in sorted(parts, key=lambda part: (part.file, part.offset)):
        last = runs[-1][-1] if runs else None
        if last is None or (last.file, last.offset + last.size_bytes) != (part.file, part.offset):
            runs.append([])
        runs[-1].append(part)
    return runs


def _take(run: Sequence[TensorPart], pieces: Iterator[bytes], replica: Replica) -> Iterator[int]:
    """Write the parts of a run while their bytes arrive; yield the size of each piece."""
    waiting = deque(run)
    digest, at = hashlib.sha256(), 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part = waiting[0]
            mine, rest = rest[: part.size_bytes - at], rest[part.size_bytes - at :]
            replica.write(part, at, mine)
            digest.update(mine)
            at += len(mine)
            if at == part.size_bytes:
                replica.record(waiting.popleft(), digest.hexdigest())
                digest, at = hashlib.sha256(), 0
        yield len(piece)
