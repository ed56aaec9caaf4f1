"""Pull some layers of a model from the Hub into the cache of replicas.

Knows how to read single tensors of files on the Hub by byte ranges; the result is a replica like
one fetched from nodes. Blocks: to be called on a thread that may wait. Must not know links.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2

from shardnet import __version__
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
from shardnet.checkpoint.tensors.manifest import TENSOR_SUFFIXES
from shardnet.checkpoint.tensors.stored_tensor import MAX_HEADER_BYTES, ByteRange, FileHead
from shardnet.cluster.download.hub import (
    RESUME,
    HubFile,
    Report,
    fetch_small,
    look_up,
    named_errors,
)
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import CheckpointError, HubError
from shardnet.types import LayerRange

SILENCE_S: Final = 15.0
"""Timeout while the Hub sends no byte."""
TRIES: Final = 5
"""Attempts in a row without a byte before a download fails."""
_LENGTH_BYTES: Final = 8
_CONNECTIONS: Final = 8
"""Samples requested at one time: each takes a round trip, and few bytes."""


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
        commit, files = look_up(name, root)
        _refuse_other_formats(name, files)
        source = _HubRanges(name, commit)
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
    source: _HubRanges,
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
        folder = cache.find(model_id)
        if folder is None:
            begin_replica(staged, model_id, "the Hub")
            folder = cache.install(staged, model_id)
    return folder, model_id


def _fill(
    replica: Replica,
    layers: LayerRange,
    source: _HubRanges,
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


class _HubRanges:
    """Reads byte ranges of a commit's files."""

    def __init__(self, name: HubName, commit: str) -> None:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self._name, self._commit = name, commit
        self._session = get_session()
        self._headers = build_hf_headers(library_name="shardnet", library_version=__version__)

    def header(self, file: HubFile) -> bytes:
        """Fetch the header of a safetensors file, its length prefix included."""
        damaged = HubError(
            f"{self._name}: {file.name} is no safetensors file", remedy="report it to its authors"
        )
        if file.size_bytes < _LENGTH_BYTES:
            raise damaged
        length = b"".join(self.stream(file.name, 0, _LENGTH_BYTES))
        end = _LENGTH_BYTES + int.from_bytes(length, "little")
        if end > min(file.size_bytes, _LENGTH_BYTES + MAX_HEADER_BYTES):
            raise damaged
        return length + b"".join(self.stream(file.name, _LENGTH_BYTES, end))

    def samples(
        self, ranges: Mapping[str, Sequence[ByteRange]]
    ) -> Iterator[tuple[str, int, bytes]]:
        """Fetch byte ranges of several files, a few at a time; yield (file, offset, bytes)."""

        def fetch(asked: tuple[str, int, int]) -> tuple[str, int, bytes]:
            file, offset, n_bytes = asked
            return file, offset, b"".join(self.stream(file, offset, offset + n_bytes))

        wanted = [(file, *part) for file, parts in ranges.items() for part in parts]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            yield from pool.map(fetch, wanted)

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [begin, end) of a file, reconnecting if a connection breaks.

        Raises HubError, or httpx2.TransportError, after TRIES attempts in a row without a byte.
        """
        left = TRIES
        while begin < end:
            had, failure = begin, None
            try:
                for piece in self._connect(file, begin, end):
                    begin += len(piece)
                    yield piece
            except httpx2.TransportError as error:
                failure = error
            left = TRIES if begin > had else left - 1
            if not left:
                raise failure or HubError(
                    f"{self._name}: {file} ends after {begin} bytes", remedy=RESUME
                )

    def _connect(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(self._name.repo, file, revision=self._commit)
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        with self._session.stream(
            "GET", url, headers=headers, timeout=SILENCE_S, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            said = response.headers.get("Content-Range", "")
            if not said.startswith(f"bytes {begin}-{end - 1}/"):
                raise HubError(
                    f"{self._name}: asked for bytes {begin} to {end} of {file}, the Hub sends "
                    f"{said or 'all'}",
                    remedy="pull the whole model",
                )
            for piece in response.iter_raw():
                if len(piece) > end - begin:
                    raise HubError(
                        f"{self._name}: more of {file} came than was asked for", remedy=RESUME
                    )
                begin += len(piece)
                yield piece
