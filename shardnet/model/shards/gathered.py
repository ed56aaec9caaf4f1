"""Linears and tables of which this shard has some outputs or rows, and gathers the others'.

Knows what is gathered before and after a linear. Must not know why it is cut so (cut.py), nor where
weights come from.

Axes in shape comments: T rows of the micro-batch, K inputs, N outputs, V rows of a table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.kernels.linear import Linear, NativeLinear, is_native
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
        n_out, n_in = own.shape
        self.shape = (n_out if out_ends is None else out_ends[-1], n_in)
        """(N, K) of the whole linear."""
        self.weights_stay = own.weights_stay

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of this shard."""
        return self.own.weights

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        if self.in_ends is not None:
            rows = self.group.gather(rows, self.in_ends)
        part = self.own(rows)
        return part if self.out_ends is None else self.group.gather(part, self.out_ends)


def multiply_each(linears: Sequence[Linear], rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """Multiply each of several rows [T_i, K] by a linear of its own: yields [T_i, N], one by one.

    Where the linears are cut over shards, which they are alike, all are gathered at once.
    """
    first = linears[0]
    if not isinstance(first, GatheredLinear) or first.in_ends is None or first.out_ends is None:
        yield from (linear(own) for linear, own in zip(linears, rows, strict=True))
        return
    inputs = [*rows]
    sizes = [len(own) for own in inputs]
    whole = torch.split(first.group.gather(torch.cat(inputs), first.in_ends), sizes)
    owns = [linear.own for linear in linears if isinstance(linear, GatheredLinear)]
    parts = torch.cat([linear(own) for linear, own in zip(owns, whole, strict=True)])
    yield from torch.split(first.group.gather(parts, first.out_ends), sizes)


class JoinedLinear:
    """A linear that the compiled library computes inside a call.

    Where it is cut over shards, the library gathers before and after it.
    """

    def __init__(self, linear: NativeLinear, gathered: GatheredLinear | None = None) -> None:
        self.linear = linear
        """The linear, or what this shard has of it."""
        self.joined = JoinedStruct()
        """How it is gathered, but for the buffers."""
        self.shape = linear.shape if gathered is None else gathered.shape
        """(N, K) of the whole linear."""
        self.n_own_in = self.shape[1]
        """The inputs that this shard has."""
        self.ends: tuple[Ends | None, Ends | None] = (None, None)
        """Where the parts of inputs and outputs end, None for what is not cut."""
        if gathered is None:
            return
        group, self.ends = gathered.group, (gathered.in_ends, gathered.out_ends)
        if gathered.in_ends is not None:
            self.n_own_in = gathered.in_ends[group.index + 1] - gathered.in_ends[group.index]
        self._kept = (group.struct, *map(_numbers, self.ends))
        self.joined = JoinedStruct(*(value and ctypes.addressof(value) for value in self._kept))

    @classmethod
    def of(cls, linear: Linear) -> JoinedLinear | None:
        """Take a linear if the library computes it, cut over shards or not; else None."""
        if is_native(linear):
            return cls(linear)
        if not isinstance(linear, GatheredLinear) or not is_native(linear.own):
            return None
        return cls(linear.own, linear)

    def buffer_bytes(self, n_rows: int, item: int) -> tuple[int, int]:
        """Return the bytes of all inputs of rows, and of the own outputs; 0 for what is not cut."""
        widths = self.shape[1], self.linear.shape[0]
        rows, part = (
            n_rows * n * item if ends else 0 for n, ends in zip(widths, self.ends, strict=True)
        )
        return rows, part


def _numbers(ends: Ends | None) -> ctypes.Array[ctypes.c_int64] | None:
    return None if ends is None else (ctypes.c_int64 * len(ends))(*ends)


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
