"""Shards of one machine, which gather through memory that they share, in the compiled library.

Knows the memory and how long a shard waits for another. Must not know what is computed, nor how
processes are started: who starts one passes it the file that the memory is of.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final

from torch import Tensor

from shardnet.errors import ConfigurationError, LostShardError
from shardnet.model.kernels.library import NativeKernels, native_kernels
from shardnet.model.shards.group import GatherStruct

BUFFER_BYTES: Final = 1 << 22
"""What a shard writes at a time at most: a row of any vocabulary fits."""
DEADLINE_S: Final = 60.0
"""How long a shard waits for another that lives: its longest step is far shorter."""
SPIN_S: Final = 0.002
"""And how much of that without sleeping: shards that have equal work are about equally far."""


class SharedMemory:
    """The memory of a group, in a file without a name that every shard's process maps."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        """Map `n_bytes` of the file `descriptor`, which stays open."""
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, n_bytes)
        self._start = (ctypes.c_char * n_bytes).from_buffer(self._mapped)
        self.address = ctypes.addressof(self._start)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Make the memory for `size` shards; its file closes with it.

        Raises ConfigurationError without the library.
        """
        kernels = _kernels()
        memory = cls(unnamed_file(shared_bytes(size)), shared_bytes(size))
        weakref.finalize(memory, os.close, memory.descriptor)
        prepare = kernels.function(
            "shardnet_prepare_shared", ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        )
        prepare(memory.address, size, BUFFER_BYTES)
        return memory

    @classmethod
    def of(cls, descriptor: int, size: int) -> SharedMemory:
        """Map the memory that another process has made for `size` shards."""
        return cls(descriptor, shared_bytes(size))

    def fail(self, index: int) -> None:
        """Say that shard `index` is lost: nobody waits for it any longer. From any thread."""
        _fail()(self.address, index)

    @property
    def failed(self) -> int | None:
        """The shard that was lost first, None for none."""
        number = ctypes.c_int32.from_address(self.address).value  # the first field of the struct
        return None if number == 0 else number - 1


def shared_bytes(size: int) -> int:
    """Return the bytes that `size` shards share."""
    count = _kernels().function("shardnet_shared_bytes", ctypes.c_int32, ctypes.c_int64)
    count.restype = ctypes.c_int64
    n_bytes: int = count(size, BUFFER_BYTES)
    return n_bytes


class MemoryGroup:
    """Shard `index` of `size` that share `memory`. It implements ShardGroup, on the CPU."""

    def __init__(
        self, memory: SharedMemory, index: int, size: int, deadline_s: float = DEADLINE_S
    ) -> None:
        self._memory = memory
        self._index = index
        self._size = size
        self._join = _kernels().function(
            "shardnet_join",
            ctypes.POINTER(GatherStruct),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        )
        self.struct = GatherStruct(
            join=ctypes.cast(self._join, ctypes.c_void_p).value,
            memory=memory.address,
            deadline_ns=int(deadline_s * 1e9),
            spin_ns=int(SPIN_S * 1e9),
            index=index,
            size=size,
        )

    @property
    def index(self) -> int:
        """See ShardGroup."""
        return self._index

    @property
    def size(self) -> int:
        """See ShardGroup."""
        return self._size

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """See ShardGroup. Raises ValueError for a part that is not of these columns."""
        own = ends[self._index + 1] - ends[self._index]
        if part.ndim != 2 or part.shape[1] != own or part.device.type != "cpu":
            raise ValueError(f"a part {list(part.shape)} on {part.device} of {own} columns")
        widest = max(end - begin for begin, end in pairwise(ends))
        if widest * part.itemsize > BUFFER_BYTES:
            raise ValueError(f"a row of {widest} columns is too wide to be gathered")
        part = part.contiguous()
        whole = part.new_empty(part.shape[0], ends[-1])
        columns = (ctypes.c_int64 * len(ends))(*ends)
        self._join(
            self.struct,
            *(part.data_ptr(), whole.data_ptr(), part.shape[0], columns, part.itemsize),
        )
        return whole

    def check(self) -> None:
        """See ShardGroup."""
        lost = self._memory.failed
        if lost is not None:
            raise LostShardError(
                f"shard {lost} of {self._size} of this stage was lost",
                remedy="the stage is loaded again; if this happens often, see that node's log",
            )


def _kernels() -> NativeKernels:
    kernels = native_kernels()
    if kernels is None:
        raise ConfigurationError(
            "stages are cut over groups of cores by the compiled library, which is not here",
            remedy="build it (scripts/setup), or name one device",
        )
    return kernels


@cache
def _fail() -> Any:
    return _kernels().function("shardnet_fail", ctypes.c_void_p, ctypes.c_int32)


def unnamed_file(n_bytes: int) -> int:
    """Make a file of zeros in memory that has no name; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardnet-shards")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, n_bytes)
    return descriptor
