"""Where streamed layers lie: memory that is read into, and memory that is computed from.

Knows how bytes come from one to the other, and who waits for whom. Must not know files, layers'
contents nor in which order layers are wanted.

On a CPU both are the same two buffers. A device with memory of its own has two buffers there, and
the bytes come from pinned memory of the host on a stream of their own, while the device computes
with the other buffer. Two orders must hold, by marks in the streams (CUDA calls them events):

- what computes with a buffer waits for the copy into it;
- the next copy into it waits for what computes with it.

And the host must not write to pinned memory that is still copied from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.kernels.device_memory import memory_named

log = logging.getLogger(__name__)

Read = Callable[[Tensor], None]
"""Reads a layer into memory of the host that has its size."""

Mark = TypeVar("Mark")
"""A place in a stream: whoever waits for it waits for all that was launched before it."""

_KEPT_SHARE = 0.5
"""So much of the memory that the host has left may be pinned for streamed layers."""


class Buffers(Protocol):
    """Two buffers, or one for each layer where those are fewer, numbered from 0.

    `fill` is called on the reading thread, all else on the thread that computes.
    """

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Take the memory for buffers of so many bytes. Raises CapacityError."""

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Bring a layer of so many bytes into a buffer that was released; `read` may raise."""

    def receive(self, buffer: int) -> None:
        """Have what is launched from now on wait for what `fill` has brought."""

    def release(self, buffer: int) -> None:
        """Have the next `fill` wait for what was launched so far."""

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the buffer that is computed from, uint8."""


class HostBuffers:
    """Buffers that the CPU computes from, where they are read into."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Take the memory. Raises CapacityError."""
        self._buffers = _taken(_pageable, n_buffers, size_bytes)

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Read into the buffer, which nobody computes from now."""
        read(self._buffers[buffer][:size_bytes])

    def receive(self, buffer: int) -> None:
        """Nothing is on its way."""

    def release(self, buffer: int) -> None:
        """The CPU is through when it says so."""

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the buffer."""
        return self._buffers[buffer]


class Transfers(Protocol[Mark]):
    """The few calls into a device that DeviceBuffers needs."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Take memory of the host that can be copied from while others compute, uint8."""

    def on_device(self, size_bytes: int) -> Tensor:
        """Take memory of the device, uint8."""

    def mark(self) -> Mark:
        """Mark what the calling thread has launched to compute so far."""

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Launch a copy on the second stream, once `after` is reached; mark its end."""

    def wait(self, mark: Mark) -> None:
        """Have what the calling thread launches from now on wait for `mark`."""

    def block(self, mark: Mark) -> None:
        """Wait here until `mark` is reached."""


class DeviceBuffers(Generic[Mark]):
    """Buffers of a device, filled from pinned memory of the host.

    Where the host has room for all layers they stay there, each read once; else they pass through
    as many pinned buffers as there are on the device, read anew every time.
    """

    def __init__(self, transfers: Transfers[Mark], spare_bytes: int) -> None:
        """`spare_bytes` of the host's memory may be pinned to keep layers."""
        self._transfers = transfers
        self._spare_bytes = spare_bytes
        self._buffers: list[Tensor] = []
        self._passed: list[Tensor] = []  # of the host, one for each buffer
        self._kept: dict[int, Tensor] = {}  # of the host, one for each layer
        self._read: set[int] = set()  # those of them that have been read
        self._copied: list[Mark | None] = []  # the end of the last copy into each buffer
        self._used: list[Mark] = []  # the end of what computes with it

    def make(self, layers: Sequence[int], n_buffers: int, size_bytes: int) -> None:
        """Take the memory here and there. Raises CapacityError."""
        pinned_bytes = 1 << (size_bytes - 1).bit_length()  # torch takes powers of two
        if len(layers) * pinned_bytes <= self._spare_bytes:
            try:
                kept = _taken(self._transfers.pinned, len(layers), size_bytes)
                self._kept = dict(zip(layers, kept, strict=True))
            except CapacityError as error:
                log.info("streamed layers pass through memory and do not stay: %s", error)
        if not self._kept:
            self._passed = _taken(self._transfers.pinned, n_buffers, size_bytes)
        self._buffers = _taken(self._transfers.on_device, n_buffers, size_bytes)
        self._copied = [None] * n_buffers
        self._used = [self._transfers.mark() for _ in range(n_buffers)]

    def fill(self, layer: int, buffer: int, size_bytes: int, read: Read) -> None:
        """Read the layer, unless it has stayed, and launch its copy."""
        source = self._source(layer, buffer)[:size_bytes]
        if layer not in self._read:
            read(source)
        if layer in self._kept:
            self._read.add(layer)
        target = self._buffers[buffer][:size_bytes]
        self._copied[buffer] = self._transfers.copy(target, source, self._used[buffer])

    def _source(self, layer: int, buffer: int) -> Tensor:
        """Return where the layer lies or may be read to on the host."""
        if self._kept:
            return self._kept[layer]
        copied = self._copied[buffer]
        if copied is not None:
            self._transfers.block(copied)
        return self._passed[buffer]

    def receive(self, buffer: int) -> None:
        """Have what computes wait for the copy."""
        copied = self._copied[buffer]
        assert copied is not None, "fill() comes first"
        self._transfers.wait(copied)

    def release(self, buffer: int) -> None:
        """Have the next copy wait for what computes."""
        self._used[buffer] = self._transfers.mark()

    def bytes_of(self, buffer: int) -> Tensor:
        """Return the device's buffer."""
        return self._buffers[buffer]


class CudaTransfers:
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, size_bytes: int) -> Tensor:
        """Take page-locked memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, size_bytes: int) -> Tensor:
        """Take memory that, once freed, is used again only after the second stream's copies."""
        taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        taken.record_stream(self._stream)
        return taken

    def mark(self) -> torch.cuda.Event:
        """Record an event on the calling thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @torch.inference_mode()  # as where the buffers were made
    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Launch the copy and record an event behind it."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied.record(self._stream)
        return copied

    def wait(self, mark: torch.cuda.Event) -> None:
        """Have the calling thread's stream wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def block(self, mark: torch.cuda.Event) -> None:
        """Wait for the event."""
        mark.synchronize()


def find_buffers(device: torch.device) -> Buffers:
    """Return where layers that are streamed to `device` lie."""
    if device.type != "cuda":
        return HostBuffers()
    spare_bytes = int(psutil.virtual_memory().available * _KEPT_SHARE)
    return DeviceBuffers(CudaTransfers(device), spare_bytes)


def _pageable(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def _taken(take: Callable[[int], Tensor], n_buffers: int, size_bytes: int) -> list[Tensor]:
    with memory_named(
        f"there is no memory for {n_buffers} layers of {size_bytes} bytes to be streamed; "
        "give the node fewer layers"
    ):
        return [take(size_bytes) for _ in range(n_buffers)]
