"""Streams layers from disk: one is read into one of two buffers while another computes.

Weights that kernels need packed, but that are plain on disk, are packed by the reading threads, a
piece at a time.

Knows files and the order in which layers are needed. Must not know what the bytes mean, where the
buffers are (buffers.py), nor why these layers are streamed.

It reads files rather than mapping them: truncating a mapped file kills the process, while a failed
read is an error; and memory is bounded by two buffers. The page cache keeps what was read as long
as memory is free.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.errors import CheckpointError
from shardnet.model.kernels.library import SCRATCH
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.worker_pool import WorkerPool
from shardnet.stage.estimate.memory_estimate import N_BUFFERS
from shardnet.stage.streaming.buffers import Buffers, HostBuffers
from shardnet.threads import DaemonThreads

ALIGNMENT: Final = 64
"""Alignment of each linear's weights in a buffer, in bytes."""
_READERS: Final = 2
"""Threads that read: one alone copies from the page cache slower than a core multiplies."""
_SHARED_BYTES: Final = 1 << 23
"""Bytes of a piece: small enough to share, large enough to read sequentially."""
_PACKED_AT_A_TIME: Final = 1 << 20
"""Bytes that are read before they are packed: they are still in the CPU's caches."""
_SILENCE_S: Final = 30.0
"""How long the disk may bring no piece: sleeping disks take 10 s to spin up."""


class Packing(Protocol):
    """Packs bytes of a file on their way into a buffer, in independent units."""

    @property
    def unit_bytes(self) -> int:
        """Stored bytes of a unit; the last unit may have fewer."""

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` stored bytes."""

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack whole units, or the last ones, uint8. Must be thread-safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes of a file that must stay as it is. `stamp` is its size, time of change and number."""

    path: Path
    offset: int
    size_bytes: int
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, offset: int, size_bytes: int) -> FilePart:
        """Name bytes of a file as it is now. Raises CheckpointError if it cannot be accessed."""
        return cls(path=path, offset=offset, size_bytes=size_bytes, stamp=_stamp(path))

    def cut(self, at_a_time: int) -> Iterator[FilePart]:
        """Split into parts of `at_a_time` bytes; the last may be shorter."""
        for begin in range(0, self.size_bytes, at_a_time):
            n_bytes = min(at_a_time, self.size_bytes - begin)
            yield replace(self, offset=self.offset + begin, size_bytes=n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A unit of work for one reading thread, and the bytes of the buffer it goes to."""

    part: FilePart
    begin: int
    end: int
    packing: Packing | None


@dataclass(slots=True, kw_only=True)
class _StreamedLayer:
    pieces: list[_Piece] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, part: FilePart, begin: int, packing: Packing | None) -> int:
        """Place a part at offset `begin` of the buffer; return its end."""
        at_a_time = _SHARED_BYTES
        if packing is not None:
            at_a_time = _units(at_a_time, packing)
        for some in part.cut(at_a_time):
            n_bytes = some.size_bytes if packing is None else packing.packed_bytes(some.size_bytes)
            piece = _Piece(part=some, begin=begin, end=begin + n_bytes, packing=packing)
            self.pieces.append(piece)
            begin = piece.end
        self.size_bytes = max(self.size_bytes, begin)
        return begin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    layer: int
    buffer: int
    done: Future[None]


class LayerStream:
    """Reads the weights of some layers in turn, one layer ahead of the computation.

    Layers are counted from 0 within the stage. Only the compute thread may call its methods; the
    reading threads end with this object.
    """

    def __init__(self, buffers: Buffers | None = None, *, silence_s: float = _SILENCE_S) -> None:
        """Take the `buffers` that layers are computed from; None is CPU memory.

        A disk that brings nothing for `silence_s` fails what waits for it.
        """
        self._buffers = buffers or HostBuffers()
        self._silence_s = silence_s
        self._is_silent = False
        self._brought: list[None] = []
        self._n_buffers = 0
        self._layers: dict[int, _StreamedLayer] = {}
        self._order: list[int] = []
        self._fetches: deque[_Fetch] = deque()
        self._reader: DaemonThreads | None = None
        self._workers = WorkerPool(_READERS, "shardnet-stream-help")
        self.made: dict[int, Linear] = {}
        """Linears that were packed for the current layer, by the offset of their weights."""
        self.n_fetched = 0
        """Layers read so far, including those in progress."""

    @property
    def n_layers(self) -> int:
        """How many layers are streamed."""
        return len(self._layers)

    def reserve(self, layer: int, parts: Iterable[FilePart], packing: Packing | None = None) -> int:
        """Add `parts`, consecutively, to what is read with the layer; return their offset.

        With `packing` each part is packed as it is read.
        """
        return self.reserve_each(layer, [(part, packing) for part in parts])

    def reserve_each(self, layer: int, parts: Iterable[tuple[FilePart, Packing | None]]) -> int:
        """Add parts as `reserve` does, each with a packing of its own."""
        streamed = self._layers.setdefault(layer, _StreamedLayer())
        begin = end = -(-streamed.size_bytes // ALIGNMENT) * ALIGNMENT
        for part, packing in parts:
            end = streamed.add(part, end, packing)
        return begin

    def start(self) -> None:
        """Allocate the buffers, once all parts are reserved, and start reading.

        Raises CapacityError if there is no memory for them.
        """
        self._order = sorted(self._layers)
        self._n_buffers = min(N_BUFFERS, len(self._order))
        if self._order:
            largest = max(layer.size_bytes for layer in self._layers.values())
            self._buffers.make(self._order, self._n_buffers, largest)
        self._reader = DaemonThreads(1, "shardnet-stream")
        if self._order:
            self._restart(self._order[0])

    def weights(self, begin: int, size_bytes: int, buffer: int) -> Tensor:
        """Return `size_bytes` at offset `begin` of a buffer, uint8: a view."""
        return self._buffers.bytes_of(buffer)[begin : begin + size_bytes]

    def buffer_of(self, layer: int) -> int:
        """Return the buffer of the current layer."""
        assert self._fetches, "need() comes first"
        assert self._fetches[0].layer == layer, "need() comes first"
        return self._fetches[0].buffer

    def need(self, layer: int) -> None:
        """Wait until the layer has been read. Does nothing for a layer that is not streamed.

        Raises CheckpointError if its file is missing, unreadable or has changed, or the disk does
        not answer; while it does not, later calls raise at once.
        """
        if layer not in self._layers:
            return
        if not self._fetches or self._fetches[0].layer != layer:  # the previous pass was abandoned
            self._restart(layer)
        self._wait_for([self._fetches[0]])
        try:
            self._fetches[0].done.result()
        except CheckpointError:
            self._drop()
            raise
        self._buffers.receive(self._fetches[0].buffer)

    def done(self, layer: int) -> None:
        """Release the layer's buffer, into which another layer is read next."""
        if layer not in self._layers:
            return
        self.made.clear()
        fetch = self._fetches.popleft()
        self._buffers.release(fetch.buffer)
        if len(self._order) <= self._n_buffers:
            self._fetches.append(fetch)  # each layer has its own buffer
            return
        self._fetch(self._after(self._fetches[-1].layer), fetch.buffer)

    def _restart(self, layer: int) -> None:
        """Start over with `layer`: the previous pass was not finished, or there was none."""
        self._drop()
        for buffer in range(self._n_buffers):
            self._buffers.release(buffer)
            self._fetch(layer, buffer)
            layer = self._after(layer)

    def _drop(self) -> None:
        self._wait_for(self._fetches)  # no read may still write to a buffer
        self._fetches.clear()
        self.made.clear()

    def _wait_for(self, fetches: Collection[_Fetch]) -> None:
        """Wait for the end of reads, while pieces come. Raises CheckpointError once none do."""
        reads = [fetch.done for fetch in fetches]
        n_brought = len(self._brought)
        while wait_for(reads, 0 if self._is_silent else self._silence_s).not_done:
            self._is_silent = len(self._brought) == n_brought
            if self._is_silent:
                part = self._layers[next(iter(fetches)).layer].pieces[0].part
                raise CheckpointError(
                    f"{part.path}: the disk does not answer for {self._silence_s:g} s, and layers "
                    "are streamed from it",
                    remedy="bring it back or `shardnet unload`, then ask again",
                )
            n_brought = len(self._brought)
        self._is_silent = False

    def _after(self, layer: int) -> int:
        return self._order[(self._order.index(layer) + 1) % len(self._order)]

    def _fetch(self, layer: int, buffer: int) -> None:
        assert self._reader is not None
        self.n_fetched += 1
        wanted = self._layers[layer]
        self._brought.clear()
        read = partial(_read_layer, self._workers, wanted, self._brought)
        done = self._reader.submit(self._buffers.fill, layer, buffer, wanted.size_bytes, read)
        self._fetches.append(_Fetch(layer=layer, buffer=buffer, done=done))


def _units(n_bytes: int, packing: Packing) -> int:
    """Round `n_bytes` down to whole units, at least one."""
    return max(1, n_bytes // packing.unit_bytes) * packing.unit_bytes


def _read_layer(
    workers: WorkerPool, layer: _StreamedLayer, brought: list[None], buffer: Tensor
) -> None:
    """Read all pieces of a layer into `buffer`, and count them in `brought`.

    Raises CheckpointError, which names the file.
    """

    def bring(piece: _Piece) -> None:
        _bring(buffer, piece)
        brought.append(None)

    workers.run(bring, layer.pieces)


def _bring(buffer: Tensor, piece: _Piece) -> None:
    """Read a piece, and pack it if necessary."""
    target, part, packing = buffer[piece.begin : piece.end], piece.part, piece.packing
    if _stamp(part.path) != part.stamp:
        raise _changed(part)
    try:
        with open_file(part.path) as file:
            file.seek(part.offset)
            if packing is None:
                _read(file, part, target)
                return
            end = 0
            for some in part.cut(_units(_PACKED_AT_A_TIME, packing)):
                stored = SCRATCH.at_least(some.size_bytes)[: some.size_bytes]
                _read(file, some, stored)
                begin, end = end, end + packing.packed_bytes(some.size_bytes)
                packing(stored, target[begin:end])
    except OSError as error:
        raise _unreadable(part.path, error) from error


def _read(file: RawIOBase, part: FilePart, target: Tensor) -> None:
    array: Any = target.numpy()  # numpy's arrays are buffers, which its types do not say
    view = memoryview(array)
    while view:
        n_bytes = file.readinto(view)
        if not n_bytes:
            raise _changed(part)
        view = view[n_bytes:]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return found.st_size, found.st_mtime_ns, found.st_ino


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: layers are streamed from it and it cannot be read ({error.strerror})",
        remedy="bring it back or `shardnet unload`, then ask again",
    )


def _changed(part: FilePart) -> CheckpointError:
    return CheckpointError(
        f"{part.path}: it has changed while layers were streamed from it",
        remedy="`shardnet unload`, then ask again",
    )
