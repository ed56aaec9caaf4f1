"""The buffers of streamed layers: memory that bytes of files are read and packed into.

On a CPU both are the same two buffers. A device with its own memory has two buffers there, filled
from pinned host memory on a separate stream, while the device computes with the other buffer. Marks
in the streams (CUDA events) enforce two orders:

- computation with a buffer waits for the copy into it; - the next copy into it waits for the
computation with it.

And the host must not write to pinned memory while it is copied from.

Weights that kernels need packed, but that are plain on disk, are packed by the thread that reads
them, a piece at a time: then they are still in its caches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from shardnet.checkpoint.replica_journal import Journal
from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import SCRATCH

log = logging.getLogger(__name__)

Read = Callable[[Tensor], None]
"""Reads a layer into host memory of its size, uint8."""

Mark = TypeVar("Mark")
"""A point in a stream: waiting for it waits for all work launched before it."""

_KEPT_SHARE = 0.5
"""The share of the host's available memory that may be pinned for streamed layers."""


class Buffers(Protocol):
    """At most two buffers, numbered from 0.

    `fill` is called on the reading thread, everything else on the compute thread.
    """

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Allocate buffers of `size_bytes` each. Raises CapacityError if there is no memory."""

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Fill a released buffer with a layer of `size_bytes`. Raises what `read` raises."""

    def receive(self, buffer: int) -> None:
        """Make later launches wait for the last `fill`."""

    def release(self, buffer: int) -> None:
        """Make the next `fill` wait for all launches so far."""

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the buffer that computes, uint8."""


class HostBuffers:
    """Buffers in CPU memory, read into and computed from."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Allocate the buffers. Raises CapacityError."""
        self._buffers = _taken(_pageable, n_buffers, size_bytes)

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Read into the buffer."""
        read(self._buffers[buffer][:size_bytes])

    def receive(self, buffer: int) -> None:
        """Do nothing: reads are synchronous."""

    def release(self, buffer: int) -> None:
        """Do nothing: the CPU computes synchronously."""

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the buffer."""
        return self._buffers[buffer]


class Transfers(Protocol[Mark]):
    """The device operations that DeviceBuffers needs."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Allocate host memory that supports asynchronous copies, uint8."""

    def on_device(self, size_bytes: int) -> Tensor:
        """Allocate device memory, uint8."""

    def mark(self) -> Mark:
        """Mark the current end of the calling thread's stream."""

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Launch a copy on the second stream, after `after`; return the mark of its end."""

    def wait(self, mark: Mark) -> None:
        """Make later launches of the calling thread wait for `mark`."""

    def block(self, mark: Mark) -> None:
        """Block the calling thread until `mark` is reached."""


class DeviceBuffers(Generic[Mark]):
    """Buffers of a device, filled from pinned host memory.

    If all layers fit in host memory they stay there, each read once; else they are read anew every
    time, through as many pinned buffers as there are on the device.
    """

    def __init__(self, transfers: Transfers[Mark], spare_bytes: int) -> None:
        """Take `spare_bytes`, the host memory that may be pinned to keep layers."""
        self._transfers = transfers
        self._spare_bytes = spare_bytes
        self._buffers: list[Tensor] = []
        self._passed: list[Tensor] = []  # of the host, one for each buffer
        self._kept: dict[int, Tensor] = {}  # of the host, one for each layer
        self._read: set[int] = set()  # those of them that have been read
        self._copied: list[Mark | None] = []  # the end of the last copy into each buffer
        self._used: list[Mark] = []  # the end of what computes with it

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Allocate host and device memory. Raises CapacityError."""
        pinned_bytes = 1 << (size_bytes - 1).bit_length()  # torch takes powers of two
        if len(layers) * pinned_bytes <= self._spare_bytes:
            try:
                kept = _taken(self._transfers.pinned, len(layers), size_bytes)
                self._kept = dict(zip(layers, kept, strict=True))
            except CapacityError as error:
                log.info("streamed layers are read anew every time, they do not fit: %s", error)
        if not self._kept:
            self._passed = _taken(self._transfers.pinned, n_buffers, size_bytes)
        self._buffers = _taken(self._transfers.on_device, n_buffers, size_bytes)
        self._copied = [None] * n_buffers
        self._used = [self._transfers.mark() for _ in range(n_buffers)]

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Read the layer, unless the host still holds it, and launch its copy."""
        source = self._source(layer, buffer)[:size_bytes]
        if layer not in self._read:
            read(source)
        if layer in self._kept:
            self._read.add(layer)
        target = self._buffers[buffer][:size_bytes]
        self._copied[buffer] = self._transfers.copy(target, source, self._used[buffer])

    def _source(self, layer: int, buffer: int) -> Tensor:
        """Return the host memory that holds the layer, or that it may be read into."""
        if self._kept:
            return self._kept[layer]
        copied = self._copied[buffer]
        if copied is not None:
            self._transfers.block(copied)
        return self._passed[buffer]

    def receive(self, buffer: int) -> None:
        """Make computation wait for the copy."""
        copied = self._copied[buffer]
        assert copied is not None, "fill() comes first"
        self._transfers.wait(copied)

    def release(self, buffer: int) -> None:
        """Make the next copy wait for computation."""
        self._used[buffer] = self._transfers.mark()

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the device's buffer."""
        return self._buffers[buffer]


class CudaTransfers:
    """Copies on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, size_bytes: int) -> Tensor:
        """Allocate page-locked memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, size_bytes: int) -> Tensor:
        """Allocate memory that, once freed, is reused only after the second stream's copies."""
        taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        taken.record_stream(self._stream)
        return taken

    def mark(self) -> torch.cuda.Event:
        """Record an event on the calling thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @torch.inference_mode()  # as for the buffers' allocation
    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Launch the copy and record an event after it."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied.record(self._stream)
        return copied

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the calling thread's stream wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def block(self, mark: torch.cuda.Event) -> None:
        """Wait for the event."""
        mark.synchronize()


def find_buffers(device: torch.device) -> Buffers:
    """Return the kind of buffers for layers that are streamed to `device`."""
    if device.type != "cuda":
        return HostBuffers()
    spare_bytes = int(psutil.virtual_memory().available * _KEPT_SHARE)
    return DeviceBuffers(CudaTransfers(device), spare_bytes)


def _pageable(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def _taken(take: Callable[[int], Tensor], n_buffers: int, size_bytes: int) -> list[Tensor]:
    with capacity_error_for(
        f"there is no memory for {n_buffers} layers of {size_bytes} bytes to be streamed",
        remedy="give the node fewer layers",
    ):
        return [take(size_bytes) for _ in range(n_buffers)]


_PACKED_AT_A_TIME: Final = 1 << 20
"""Bytes that are read before they are packed: they are still in the CPU's caches."""


class FileChanged(Exception):
    """A file is no longer what it was when its part was named."""


class Packing(Protocol):
    """Packs bytes of a file on their way into a buffer, in independent units."""

    @property
    def unit_bytes(self) -> int:
        """Stored bytes of a unit; the last unit may have fewer."""

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` stored bytes."""

    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack whole units, or the last ones, uint8. Must be thread-safe."""


class FileState:
    """What a file was when it was named: its size, time of change and number.

    One of a replica that has dropped `n_dropped` parts may get further tensors, but none anew.
    """

    def __init__(self, path: Path, n_dropped: int | None) -> None:
        self._path = path
        self._n_dropped = n_dropped
        self._stamp = self._now()

    def check(self) -> None:
        """Raise FileChanged unless the file has what it had, OSError if it is missing."""
        now = self._now()
        if now == self._stamp:
            return
        journal = Journal.find(self._path.parent) if self._n_dropped is not None else None
        if journal is None or journal.n_dropped != self._n_dropped or now[1:] != self._stamp[1:]:
            raise FileChanged
        self._stamp = now

    def _now(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes of a file that must stay what they are."""

    path: Path
    offset: int
    size_bytes: int
    state: FileState

    @classmethod
    def of(cls, path: Path, offset: int, size_bytes: int, n_dropped: int | None = None) -> FilePart:
        """Name bytes of a file as it is now; for `n_dropped` see FileState.

        Raises CheckpointError if it cannot be accessed.
        """
        try:
            state = FileState(path, n_dropped)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror})", remedy="bring it back, then ask again"
            ) from error
        return cls(path=path, offset=offset, size_bytes=size_bytes, state=state)

    def opened(self) -> RawIOBase:
        """Open the file. Raises FileChanged, OSError, CheckpointError for a special file."""
        self.state.check()
        return open_file(self.path)

    def cut(self, at_a_time: int) -> Iterator[FilePart]:
        """Split into parts of `at_a_time` bytes; the last may be shorter."""
        for begin in range(0, self.size_bytes, at_a_time):
            n_bytes = min(at_a_time, self.size_bytes - begin)
            yield replace(self, offset=self.offset + begin, size_bytes=n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A unit of work for one reading thread, and the bytes of the buffer it goes to."""

    part: FilePart
    begin: int
    end: int
    packing: Packing | None


def pieces_of(
    parts: Iterable[tuple[FilePart, Packing | None]], begin: int, at_a_time: int
) -> Iterator[Piece]:
    """Cut parts into pieces of about `at_a_time` bytes, one behind the other from `begin` on."""
    for part, packing in parts:
        size = at_a_time if packing is None else _units(at_a_time, packing)
        for some in part.cut(size):
            n_bytes = some.size_bytes if packing is None else packing.packed_bytes(some.size_bytes)
            yield Piece(part=some, begin=begin, end=begin + n_bytes, packing=packing)
            begin += n_bytes


def bring(buffer: Tensor, piece: Piece) -> None:
    """Read a piece into `buffer`, uint8, and pack it if necessary.

    Raises FileChanged, OSError if the file cannot be read, CheckpointError for a special file.
    """
    target, part, packing = buffer[piece.begin : piece.end], piece.part, piece.packing
    with part.opened() as file:
        file.seek(part.offset)
        if packing is None:
            fill(file, target)
            return
        end = 0
        for some in part.cut(_units(_PACKED_AT_A_TIME, packing)):
            stored = SCRATCH.at_least(some.size_bytes)[: some.size_bytes]
            fill(file, stored)
            begin, end = end, end + packing.packed_bytes(some.size_bytes)
            packing(stored, target[begin:end])


def _units(n_bytes: int, packing: Packing) -> int:
    """Round `n_bytes` down to whole units, at least one."""
    return max(1, n_bytes // packing.unit_bytes) * packing.unit_bytes


def fill(file: RawIOBase, target: Tensor) -> None:
    """Read all of `target`, uint8, from where the file is. Raises FileChanged, OSError."""
    array: Any = target.numpy()  # numpy's arrays are buffers, which its types do not say
    view = memoryview(array)
    while view:
        n_bytes = file.readinto(view)
        if not n_bytes:
            raise FileChanged
        view = view[n_bytes:]
