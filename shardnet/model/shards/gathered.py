"""Linears and tables of which this shard has some outputs or rows, and gathers the others'.

Knows what is gathered before and after a linear. Must not know why it is cut so (cut.py), nor where
weights come from.

Axes in shape comments: T rows of the micro-batch, K inputs, N outputs, V rows of a table.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.kernels.linear import Linear
from shardnet.model.shards.group import JoinedStruct, ShardGroup

Ends = tuple[int, ...]
"""Where the columns of each shard begin, and the end of the last one's."""


class GatheredLinear:
    """A linear whose outputs are cut over shards, and gathered: rows [T, K] to [T, N].

    With `in_ends` its inputs are cut, too: rows [T, own inputs] are gathered first.
    """

    is_native = False

    def __init__(
        self, own: Linear, group: ShardGroup, in_ends: Ends | None, out_ends: Ends | None
    ) -> None:
        """Gather around `own`, which has this shard's outputs; None for nothing to gather."""
        self.own = own
        self.group = group
        self.in_ends = in_ends
        self.out_ends = out_ends

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the whole linear."""
        n_out, n_in = self.own.shape
        return n_out if self.out_ends is None else self.out_ends[-1], n_in

    @property
    def weights_stay(self) -> bool:
        """Whether the weights stay at one address for as long as the linear is used."""
        return self.own.weights_stay

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        if self.in_ends is not None:
            rows = self.group.gather(rows, self.in_ends)
        part = self.own(rows)
        return part if self.out_ends is None else self.group.gather(part, self.out_ends)


class NativeJoin:
    """What the compiled library needs to gather before and after a linear inside a call."""

    def __init__(self, group: ShardGroup, in_ends: Ends, out_ends: Ends) -> None:
        self._in, self._out = _numbers(in_ends), _numbers(out_ends)
        self._gather = group.struct
        self.n_in, self.n_part = in_ends[-1], out_ends[group.index + 1] - out_ends[group.index]
        self.n_out = out_ends[-1]
        self.struct = JoinedStruct(
            gather=ctypes.addressof(self._gather),
            in_ends=ctypes.addressof(self._in),
            out_ends=ctypes.addressof(self._out),
        )


def _numbers(ends: Ends) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(ends))(*ends)


class LookUp(Protocol):
    """A table of some rows."""

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T]: a new tensor [T, E]."""


class GatheredTable:
    """A table [V, E] whose rows are cut over shards: each looks up what it has.

    Of the rows that all shards give for an id that of its owner counts, unchanged.
    """

    def __init__(self, own: LookUp, group: ShardGroup, ends: Ends, width: int) -> None:
        """Take the table with rows `[ends[index], ends[index + 1])`, `width` columns each."""
        self._own = own
        self._group = group
        self._ends = ends
        self._columns = tuple(width * shard for shard in range(group.size + 1))

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T]: a new tensor [T, E]."""
        begin, end = self._ends[self._group.index : self._group.index + 2]
        part = self._own.rows((ids - begin).clamp(0, end - begin - 1))  # [T, E], not all its own
        of_all = self._group.gather(part, self._columns)  # [T, shards x E]
        parts = of_all.view(len(ids), self._group.size, -1)
        borders = torch.tensor(self._ends[1:-1], device=ids.device)
        owners = torch.bucketize(ids, borders, right=True)  # [T]
        return parts[torch.arange(len(ids), device=ids.device), owners]
