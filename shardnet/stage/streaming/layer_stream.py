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

from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from torch import Tensor

from shardnet.errors import CheckpointError
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.worker_pool import WorkerPool
from shardnet.stage.estimate.memory_estimate import N_BUFFERS
from shardnet.stage.streaming.buffers import (
    Buffers,
    FileChanged,
    FilePart,
    HostBuffers,
    Packing,
    Piece,
    bring,
    pieces_of,
)
from shardnet.threads import DaemonThreads

ALIGNMENT: Final = 64
"""Alignment of each linear's weights in a buffer, in bytes."""
_READERS: Final = 2
"""Threads that read: one alone copies from the page cache slower than a core multiplies."""
PIECE_BYTES: Final = 1 << 23
"""Bytes of a piece: small enough to share, large enough to read sequentially."""
SILENCE_S: Final = 30.0
"""How long the disk may bring no piece: sleeping disks take 10 s to spin up."""


class DiskWatch:
    """Waits for what a disk brings, as long as it brings anything in `silence_s`.

    `what` is streamed from it. Only the compute thread waits.
    """

    def __init__(self, silence_s: float, what: str) -> None:
        self._silence_s = silence_s
        self._what = what
        self._n_brought = 0
        self._is_silent = False

    def brought(self) -> None:
        """Count a piece, on any thread: one that is lost among others does not matter."""
        self._n_brought += 1

    def wait_for(self, reads: Collection[Future[None]], path: Path) -> None:
        """Wait for the end of reads from `path`.

        Raises CheckpointError once no piece comes, and at once while that lasts.
        """
        n_brought = self._n_brought
        while wait(reads, 0 if self._is_silent else self._silence_s).not_done:
            self._is_silent = self._n_brought == n_brought
            if self._is_silent:
                raise CheckpointError(
                    f"{path}: the disk does not answer for {self._silence_s:g} s, and "
                    f"{self._what} are streamed from it",
                    remedy="bring it back or `shardnet unload`, then ask again",
                )
            n_brought = self._n_brought
        self._is_silent = False


@dataclass(slots=True, kw_only=True)
class _StreamedLayer:
    pieces: list[Piece] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, part: FilePart, begin: int, packing: Packing | None) -> int:
        """Place a part at offset `begin` of the buffer; return its end."""
        pieces = list(pieces_of([(part, packing)], begin, PIECE_BYTES))
        self.pieces += pieces
        end = pieces[-1].end if pieces else begin
        self.size_bytes = max(self.size_bytes, end)
        return end


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

    def __init__(self, buffers: Buffers | None = None, *, silence_s: float = SILENCE_S) -> None:
        """Take the `buffers` that layers are computed from; None is CPU memory.

        A disk that brings nothing for `silence_s` fails what waits for it.
        """
        self._buffers = buffers or HostBuffers()
        self._disk = DiskWatch(silence_s, "layers")
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
        begin = end = aligned(streamed.size_bytes)
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
        except Exception:
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
        """Wait for the end of reads. Raises CheckpointError as DiskWatch.wait_for."""
        if fetches:
            part = self._layers[next(iter(fetches)).layer].pieces[0].part
            self._disk.wait_for([fetch.done for fetch in fetches], part.path)

    def _after(self, layer: int) -> int:
        return self._order[(self._order.index(layer) + 1) % len(self._order)]

    def _fetch(self, layer: int, buffer: int) -> None:
        assert self._reader is not None
        self.n_fetched += 1
        wanted = self._layers[layer]
        read = partial(_read_layer, self._workers, wanted, self._disk)
        done = self._reader.submit(self._buffers.fill, layer, buffer, wanted.size_bytes, read)
        self._fetches.append(_Fetch(layer=layer, buffer=buffer, done=done))


def _read_layer(
    workers: WorkerPool, layer: _StreamedLayer, disk: DiskWatch, buffer: Tensor
) -> None:
    """Read all pieces of a layer into `buffer`. Raises CheckpointError, which names the file."""

    def read(piece: Piece) -> None:
        read_piece(buffer, piece)
        disk.brought()

    workers.run(read, layer.pieces)


def read_piece(buffer: Tensor, piece: Piece) -> None:
    """Read a piece into `buffer`, uint8. Raises CheckpointError, which names the file."""
    try:
        bring(buffer, piece)
    except FileChanged:
        raise _changed(piece.part) from None
    except OSError as error:
        raise _unreadable(piece.part.path, error) from error


def aligned(size_bytes: int) -> int:
    """Round up to where the weights of a linear may begin."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


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
