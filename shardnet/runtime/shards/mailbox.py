"""Memory through which the first shard of a stage tells the others what to do.

One call stands there at a time, for all of them. Who waits for it spins for a moment, then sleeps
until a byte comes through its socket. Knows bytes only.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from shardnet.errors import LostShardError
from shardnet.model.kernels.library import native_kernels

SPIN_NS: Final = 3_000_000
"""How long a shard looks for the next call before it sleeps: decode steps follow closely."""
_LINE: Final = 8
"""Numbers of a cache line."""
_DEADLINE_S: Final = 60.0


class Mailbox:
    """Shared memory: a count of calls, one of those that each shard has taken, and a call."""

    def __init__(self, descriptor: int, n_bytes: int, size: int) -> None:
        """Map a file of `n_bytes`, for a group of `size`; the caller closes the file."""
        self._mapped = mmap.mmap(descriptor, n_bytes)
        self._view = memoryview(self._mapped)
        n_numbers = _LINE * (size + 2)
        self._numbers = (ctypes.c_int64 * n_numbers).from_buffer(self._mapped)
        self._head = n_numbers * ctypes.sizeof(ctypes.c_int64)
        self.capacity = n_bytes - self._head
        """The bytes of the largest call."""
        kernels = native_kernels()
        assert kernels is not None, "stages are cut over processes by the library only"
        self._wait: Any = kernels.function(
            "shardnet_wait", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        )
        self._set: Any = kernels.function("shardnet_set", ctypes.c_void_p, ctypes.c_int64)
        self._size = size

    @staticmethod
    def bytes_for(size: int, capacity: int) -> int:
        """Return the bytes of a mailbox for calls of at most `capacity` bytes."""
        return _LINE * (size + 2) * ctypes.sizeof(ctypes.c_int64) + capacity

    # The numbers: calls, bytes of this one's message, bytes of all of it; then a line per shard.

    def put(self, message: bytes, parts: Sequence[Any], check: Callable[[], None]) -> None:
        """Write a call once all shards have taken the one before.

        `check` raises if a shard is lost.
        """
        self._await_taken(check)
        at = self._head
        self._view[at : at + len(message)] = message
        at += len(message)
        for part in parts:
            self._view[at : at + len(part)] = part
            at += len(part)
        self._numbers[1], self._numbers[2] = len(message), at - self._head
        self._set(self._address(0), self._numbers[0] + 1)

    def _await_taken(self, check: Callable[[], None]) -> None:
        started = time.monotonic()
        for index in range(1, self._size):
            place = _LINE * (index + 1)
            while (seen := self._numbers[place]) != self._numbers[0]:
                self._wait(self._address(place), seen, SPIN_NS)
                if self._numbers[place] == seen:
                    check()
                if time.monotonic() - started > _DEADLINE_S:
                    raise LostShardError(
                        f"shard {index} of {self._size} has taken no call for {_DEADLINE_S:g} s"
                    )

    def wait(self, n_taken: int) -> None:
        """Spin until there is a call beyond the first `n_taken`, for a moment at most."""
        self._wait(self._address(0), n_taken, SPIN_NS)

    def take(self) -> tuple[bytes, memoryview]:
        """Return the call's message, and what follows it, to be read before `taken`."""
        middle, end = self._head + self._numbers[1], self._head + self._numbers[2]
        return bytes(self._view[self._head : middle]), self._view[middle:end]

    def taken(self, index: int) -> None:
        """Say that shard `index` has read the call."""
        place = _LINE * (index + 1)
        self._set(self._address(place), self._numbers[place] + 1)

    def _address(self, place: int) -> int:
        return ctypes.addressof(self._numbers) + place * ctypes.sizeof(ctypes.c_int64)
