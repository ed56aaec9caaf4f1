"""Where received bytes wait: one scratch buffer per link, and the parts of the frame being filled.

Knows buffers only; what the bytes mean is the business of connection/connection.py.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

from shardnet.wire.framing.frames import KIB

SCRATCH_BYTES: Final = 64 * KIB
ALIGNMENT: Final = 64
"""Payloads start at a multiple of this address, as vector instructions like it."""
LEAST_ALIGNED_BYTES: Final = 16 * KIB
"""Smaller ones may start anywhere, if they came whole."""
UNTOUCHED_BYTES: Final = 16 * 1024 * KIB
"""Larger ones take memory as their bytes come: an announced length alone costs nothing."""


class ReceiveBuffer:
    """Received bytes that are not taken yet. At most SCRATCH_BYTES, which the first take."""

    __slots__ = ("_end", "_start", "_view")

    def __init__(self) -> None:
        self._view = memoryview(b"")
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def room(self) -> memoryview:
        """Return the free space behind the waiting bytes, which move to the front."""
        waiting = self._end - self._start
        if not self._view:
            self._view = memoryview(bytearray(SCRATCH_BYTES))
        if not waiting:
            self._start = self._end = 0
            return self._view
        if self._start:
            self._view[:waiting] = self._view[self._start : self._end]
            self._start, self._end = 0, waiting
        return self._view[self._end :]

    def filled(self, n: int) -> None:
        """Record that `n` bytes were put at the start of `room`."""
        self._end += n

    @property
    def waiting(self) -> memoryview:
        """The bytes that wait."""
        return self._view[self._start : self._end]

    def skip(self, n: int) -> None:
        """Take `n` bytes that `waiting` gave."""
        self._start += n

    def peek(self, n: int) -> memoryview:
        """Return the first `n` waiting bytes, or all when there are fewer; they go on waiting."""
        return self._view[self._start : min(self._start + n, self._end)]

    def take(self, n: int) -> memoryview:
        """Return what `peek` gives; the bytes wait no longer."""
        start = self._start
        self._start = min(start + n, self._end)
        return self._view[start : self._start]

    def clear(self) -> None:
        """Forget the waiting bytes."""
        self._start = self._end = 0


class FramePart:
    """The meta or the payload of a frame while it is filled. Takes the memory for it."""

    __slots__ = ("missing", "view")

    def __init__(self, n: int, *, aligned: bool = False) -> None:
        self.view = _aligned(n) if aligned else memoryview(bytearray(n))
        self.missing = n
        """Bytes still to come."""

    def room(self) -> memoryview:
        """Return the place of the bytes still to come."""
        return self.view[len(self.view) - self.missing :]

    def filled(self, n: int) -> None:
        """Record that `n` bytes were put at the start of `room`."""
        self.missing -= n

    def fill_from(self, received: ReceiveBuffer) -> bool:
        """Copy what is waiting, as much as is missing. Returns whether nothing is missing now."""
        if self.missing:
            data = received.take(self.missing)
            if len(data) == len(self.view):
                self.view[:] = data
                self.missing = 0
                return True
            start = len(self.view) - self.missing
            self.view[start : start + len(data)] = data
            self.missing -= len(data)
        return not self.missing


def payload_copy(data: memoryview) -> memoryview:
    """Copy a small payload that has come whole. Looking for an aligned place would cost more than
    it saves on a row or two.
    """
    if len(data) >= LEAST_ALIGNED_BYTES:
        copy = _aligned(len(data))
        copy[:] = data
        return copy
    return memoryview(bytearray(data))


def _aligned(n: int) -> memoryview:
    if n > UNTOUCHED_BYTES:
        return memoryview(mmap.mmap(-1, n, access=mmap.ACCESS_COPY))
    raw = bytearray(n + ALIGNMENT - 1)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(raw)) % ALIGNMENT
    return memoryview(raw)[offset : offset + n]
