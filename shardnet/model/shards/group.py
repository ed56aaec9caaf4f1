"""The shards of one stage, which exchange the columns that each has computed.

Knows what a shard may ask of the others. Must not know what is computed, nor by what means shards
reach each other: memory_group.py is for processes of one machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardnet.errors import ShardnetError


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
        ("join", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("deadline_ns", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("index", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


class JoinedStruct(ctypes.Structure):
    """`struct joined` of csrc/gather.h."""

    _fields_ = (
        ("gather", ctypes.c_void_p),
        ("in_ends", ctypes.c_void_p),
        ("out_ends", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("part", ctypes.c_void_p),
    )


_Join = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int64,
)


class PythonGather:
    """Lets the compiled library gather by a function of Python, for groups that have no other."""

    def __init__(self, group: ShardGroup) -> None:
        """Gather by `group.gather`, whose ShardnetErrors are kept: see `raise_error`."""
        self._group = group
        self._error: ShardnetError | None = None
        self._function = _Join(self._join)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        self.struct = GatherStruct(join=address, index=group.index, size=group.size)

    def raise_error(self) -> None:
        """Raise what the last call of the library met, if anything."""
        if self._error is not None:
            raise self._error

    def _join(self, _self: int, part: int, whole: int, n_rows: int, ends: Any, item: int) -> None:
        if self._error is not None:
            return
        size, index = self._group.size, self._group.index
        columns = [int(ends[shard]) for shard in range(size + 1)]
        dtype = torch.bfloat16 if item == torch.bfloat16.itemsize else torch.float32
        own = columns[index + 1] - columns[index]
        try:
            joined = self._group.gather(_view(part, (n_rows, own), dtype), columns)
        except ShardnetError as error:
            self._error = error.with_traceback(None)
            return
        _view(whole, (n_rows, columns[-1]), dtype).copy_(joined)


def _view(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of memory that the library's caller owns."""
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    if not n_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
