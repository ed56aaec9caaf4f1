"""The shards of one stage, which exchange what each has computed: over links, or shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardnet.errors import (
    ConfigurationError,
    LostShardError,
    ShardnetError,
    internal_error,
    without_frames,
)
from shardnet.model.kernels.library import NativeKernels, fields, native_kernels


class ShardGroup(Protocol):
    """Shard `index` of `size` of a stage, as it sees the group.

    All shards make the same calls in the same order, each from one thread. A group that has failed
    stays so: `check` raises, and what is gathered is worthless.
    """

    @property
    def index(self) -> int:
        """The number of this shard, from 0 on."""

    @property
    def size(self) -> int:
        """How many shards there are."""

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """Join the parts of all shards: own columns [T, ends[i + 1] - ends[i]] to [T, ends[-1]].

        Shard i has the columns from `ends[i]` to `ends[i + 1]`. Does not raise when the group
        fails: the caller calls `check` after its last gather.
        """

    @property
    def struct(self) -> GatherStruct:
        """The same for the compiled library, which gathers inside a call."""

    def check(self) -> None:
        """Raise LostShardError, which names the shard, if the group has failed."""


class GatherStruct(ctypes.Structure):
    """`struct gather` of csrc/gather.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "join", "memory"),
        *fields(ctypes.c_int64, "deadline_ns", "spin_ns"),
        *fields(ctypes.c_int32, "index", "size"),
        *fields(ctypes.c_void_p, "post", "await"),
    )


class JoinedStruct(ctypes.Structure):
    """`struct joined` of csrc/gather.h."""

    _fields_ = fields(ctypes.c_void_p, "gather", "in_ends", "out_ends", "rows", "part")


_Join = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
)


_Await = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class PythonGroup(Protocol):
    """A group that gathers in Python."""

    @property
    def index(self) -> int:
        """See ShardGroup."""

    @property
    def size(self) -> int:
        """See ShardGroup."""

    def joining(self, part: Tensor, whole: Tensor, ends: Sequence[int]) -> Callable[[], None]:
        """Return what begins to join the parts of all shards in `whole`, as often as it is called.

        `part` stays as it is until the join is over. Raises a ShardnetError when called, if the
        group has failed.
        """

    def end_joins(self, n_left: int) -> None:
        """Wait until all joins but the last `n_left` that began are over. Raises the same."""


class PythonGather:
    """Lets the compiled library gather by functions of Python."""

    def __init__(self, group: PythonGroup) -> None:
        """Gather by `group.joining`; errors are kept."""
        self._group = group
        self.error: ShardnetError | None = None
        """What a call of the library has met: parts are joined again when it is forgotten."""
        self._joinings: dict[tuple[int, ...], Callable[[], None]] = {}
        self._functions = (_Join(self._join), _Join(self._post), _Await(self._await))
        join, post, end = (ctypes.cast(each, ctypes.c_void_p).value for each in self._functions)
        names = {"join": join, "post": post, "await": end}
        self.struct = GatherStruct(index=group.index, size=group.size, **names)

    def raise_error(self) -> None:
        """Raise what a call of the library has met, if anything."""
        if self.error is not None:
            raise self.error

    def _join(self, gather: int, part: int, whole: int, n_rows: int, ends: int, item: int) -> None:
        self._post(gather, part, whole, n_rows, ends, item)
        self._await(gather, 0)

    def _post(self, _gather: int, part: int, whole: int, n_rows: int, ends: int, item: int) -> None:
        if self.error is not None:
            return
        try:
            key = (part, whole, n_rows, ends, item)
            joining = self._joinings.get(key)
            if joining is None:
                if len(self._joinings) >= _MOST_JOININGS:
                    self._joinings.clear()
                joining = self._joinings[key] = self._joining(*key)
            joining()
        except Exception as error:  # ctypes would print it and go on with what `whole` has
            self._keep(error)

    def _await(self, _gather: int, n_left: int) -> None:
        if self.error is not None:
            return
        try:
            self._group.end_joins(n_left)
        except Exception as error:
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        self.error = without_frames(internal_error("a gather of parts", error))

    def _joining(
        self, part: int, whole: int, n_rows: int, ends: int, item: int
    ) -> Callable[[], None]:
        """Make what joins rows at these addresses, which the library uses again in every step."""
        size, index = self._group.size, self._group.index
        columns = [*(ctypes.c_int64 * (size + 1)).from_address(ends)]
        dtype = torch.bfloat16 if item == torch.bfloat16.itemsize else torch.float32
        own = columns[index + 1] - columns[index]
        rows, joined = (
            _view(address, (n_rows, width), dtype)
            for address, width in ((part, own), (whole, columns[-1]))
        )
        return self._group.joining(rows, joined, columns)


_MOST_JOININGS: Final = 4096
"""Addresses and shapes that are remembered: four to eight for each layer and number of rows."""


def _view(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of memory that the library's caller owns."""
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    if not n_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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
        self.index = index
        self.size = size
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

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """See ShardGroup. Raises ValueError for a part that is not of these columns."""
        own = ends[self.index + 1] - ends[self.index]
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
                f"shard {lost} of {self.size} of this stage was lost",
                remedy="the stage is loaded again; if this happens often, see that node's log",
            )


def _kernels() -> NativeKernels:
    kernels = native_kernels()
    if kernels is None:
        raise ConfigurationError(
            "stages are cut over groups of cores by the compiled library, which is not here",
            remedy="install a C compiler and then shardnet again, or name one device",
        )
    return kernels


@cache
def _fail() -> Any:
    return _kernels().function("shardnet_fail", ctypes.c_void_p, ctypes.c_int32)


def unnamed_file(n_bytes: int) -> int:
    """Make a file of zeros in memory that has no name; returns its descriptor."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardnet-shards")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, n_bytes)
    return descriptor
