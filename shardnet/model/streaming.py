"""Layers that stay on disk: read into one of two buffers while another one computes.

Knows files and the order in which layers are wanted. Must not know what the bytes mean, where the
buffers lie (buffers.py), nor why these layers are streamed.

Reads, not a mapping: of a mapped file that is cut off meanwhile the process dies, of a read file it
can tell; and two buffers are all the memory that it takes. The system keeps pages of what was read
as long as nobody else wants the memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from shardnet.errors import CheckpointError
from shardnet.model.buffers import Buffers, HostBuffers
from shardnet.model.footprint import N_BUFFERS
from shardnet.model.kernels import Linear

ALIGNMENT: Final = 64
"""Bytes that each product's weights begin at a multiple of."""
_READ_AT_A_TIME: Final = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes of a file that must stay as it is. `stamp` is its size, time of change and number."""

    path: Path
    offset: int
    size_bytes: int
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, offset: int, size_bytes: int) -> FilePart:
        """Name bytes of a file as it is now. Raises CheckpointError when it cannot be looked at."""
        return cls(path=path, offset=offset, size_bytes=size_bytes, stamp=_stamp(path))


@dataclass(slots=True, kw_only=True)
class _StreamedLayer:
    parts: list[tuple[int, FilePart]] = field(default_factory=list)  # and where they go
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    layer: int
    buffer: int
    done: Future[None]


class LayerStream:
    """Reads the weights of some layers in turn, one ahead of those that compute.

    Layers are counted from 0 within the stage. One thread computes and calls everything here; the
    reading is done on a thread that ends with this object.
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        """`buffers` are where the layers are computed from; None is memory of the CPU."""
        self._buffers = buffers or HostBuffers()
        self._n_buffers = 0
        self._layers: dict[int, _StreamedLayer] = {}
        self._order: list[int] = []
        self._fetches: deque[_Fetch] = deque()
        self._reader: ThreadPoolExecutor | None = None
        self.made: dict[int, Linear] = {}
        """Products that were packed for the layer at work, by where their weights begin."""
        self.n_fetched = 0
        """Layers read so far, those that are being read included."""

    @property
    def n_layers(self) -> int:
        """How many layers are streamed."""
        return len(self._layers)

    def reserve(self, layer: int, parts: Iterable[FilePart]) -> int:
        """Have `parts` read one behind the other with the layer; return where they will begin."""
        streamed = self._layers.setdefault(layer, _StreamedLayer())
        begin = -(-streamed.size_bytes // ALIGNMENT) * ALIGNMENT
        end = begin
        for part in parts:
            streamed.parts.append((end, part))
            end += part.size_bytes
        streamed.size_bytes = end
        return begin

    def start(self) -> None:
        """Make the buffers, once all parts are reserved, and begin to read.

        Raises CapacityError where there is no memory for them.
        """
        self._order = sorted(self._layers)
        self._n_buffers = min(N_BUFFERS, len(self._order))
        if self._order:
            largest = max(layer.size_bytes for layer in self._layers.values())
            self._buffers.make(self._order, self._n_buffers, largest)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shardnet-stream")
        if self._order:
            self._restart(self._order[0])

    def weights(self, begin: int, size_bytes: int, buffer: int) -> Tensor:
        """Return the bytes that begin there in a buffer, as uint8."""
        return self._buffers.bytes_of(buffer)[begin : begin + size_bytes]

    def buffer_of(self, layer: int) -> int:
        """Say in which buffer the layer is that is computed now."""
        assert self._fetches, "need() comes first"
        assert self._fetches[0].layer == layer, "need() comes first"
        return self._fetches[0].buffer

    def need(self, layer: int) -> None:
        """Wait until the layer has been read. Does nothing for one that is not streamed.

        Raises CheckpointError when its file is gone or is not what it was.
        """
        if layer not in self._layers:
            return
        if not self._fetches or self._fetches[0].layer != layer:  # the pass before was given up
            self._restart(layer)
        try:
            self._fetches[0].done.result()
        except CheckpointError:
            self._drop()
            raise
        self._buffers.receive(self._fetches[0].buffer)

    def done(self, layer: int) -> None:
        """Have another layer read into the buffer of this one."""
        if layer not in self._layers:
            return
        self.made.clear()
        fetch = self._fetches.popleft()
        self._buffers.release(fetch.buffer)
        if len(self._order) <= self._n_buffers:
            self._fetches.append(fetch)  # each has a buffer for itself
            return
        self._fetch(self._after(self._fetches[-1].layer), fetch.buffer)

    def _restart(self, layer: int) -> None:
        """Begin anew with `layer`: the pass before was not finished, or there was none."""
        self._drop()
        for buffer in range(self._n_buffers):
            self._buffers.release(buffer)
            self._fetch(layer, buffer)
            layer = self._after(layer)

    def _drop(self) -> None:
        wait_for([fetch.done for fetch in self._fetches])  # nothing may write to a buffer now
        self._fetches.clear()
        self.made.clear()

    def _after(self, layer: int) -> int:
        return self._order[(self._order.index(layer) + 1) % len(self._order)]

    def _fetch(self, layer: int, buffer: int) -> None:
        assert self._reader is not None
        self.n_fetched += 1
        wanted = self._layers[layer]
        done = self._reader.submit(
            self._buffers.fill, layer, buffer, wanted.size_bytes, partial(_read_layer, wanted)
        )
        self._fetches.append(_Fetch(layer=layer, buffer=buffer, done=done))


def _read_layer(layer: _StreamedLayer, buffer: Tensor) -> None:
    """Read a layer's parts to their places. Raises CheckpointError, which names the file."""
    array: Any = buffer.numpy()  # numpy's arrays are buffers, which its types do not say
    view = memoryview(array)
    for begin, part in layer.parts:
        _read_part(part, view[begin : begin + part.size_bytes])


def _read_part(part: FilePart, view: memoryview) -> None:
    if _stamp(part.path) != part.stamp:
        raise _changed(part)
    try:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.offset)
            while view:
                n_bytes = file.readinto(view[:_READ_AT_A_TIME])
                if not n_bytes:
                    raise _changed(part)
                view = view[n_bytes:]
    except OSError as error:
        raise _unreadable(part.path, error) from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return found.st_size, found.st_mtime_ns, found.st_ino


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: layers are streamed from it and it cannot be read ({error.strerror}); bring it "
        "back or `shardnet unload`, then ask again"
    )


def _changed(part: FilePart) -> CheckpointError:
    return CheckpointError(
        f"{part.path}: it has changed while layers were streamed from it; `shardnet unload`, then "
        "ask again"
    )
