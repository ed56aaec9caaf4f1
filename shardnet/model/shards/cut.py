"""Which outputs, heads and inner columns each shard of a stage has.

Knows the one rule by which everything is cut. Must not know weights, nor how shards exchange rows.

Linears are cut by their outputs only, and parts are gathered, never summed: an output is one dot
product in the order that it always had, so that its bits are those of the whole stage (design
decision 4). Quantised weights share scales along their inputs, which stay whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import PANEL

MAX_SHARDS = 16
"""Shards of one stage at most."""
WHOLE_WEIGHTS = 1 << 22
"""A linear or table of at most so many weights is whole in every shard, unless its inputs or what
follows are cut: to read the others' weights takes less time than to gather their outputs."""

Range = tuple[int, int]
"""Begin and end."""


class Axis(enum.Enum):
    """What consecutive outputs of a linear, or its inputs, are."""

    HEADS = "heads"
    """Query heads, or what comes of them."""
    KV_HEADS = "KV heads"
    INNER = "inner"
    """The columns between the two linears of an MLP."""


HEADS_EACH = (Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS)
"""The outputs of queries, keys and values."""
INNER_EACH = (Axis.INNER, Axis.INNER)
"""The outputs of gate and up."""


def shares(total: int, n_shards: int) -> tuple[int, ...]:
    """Cut `total` columns into equal parts: where each begins, and the end; `n_shards` + 1 numbers.

    Whole panels of 16 outputs, where there are enough of them. Raises UsageError for more shards
    than columns.
    """
    if total < n_shards:
        raise UsageError(
            f"{total} columns cannot be cut over {n_shards} shards",
            remedy="name fewer devices, or lower --tensor-parallel",
        )
    n_panels = -(-total // PANEL)
    if n_panels < n_shards:
        return tuple(total * shard // n_shards for shard in range(n_shards + 1))
    return tuple(
        min(total, PANEL * (n_panels * shard // n_shards)) for shard in range(n_shards + 1)
    )


def stays_whole(n_out: int, n_in: int) -> bool:
    """Say whether a linear or table [n_out, n_in] is too small to be cut by itself."""
    return n_out * n_in <= WHOLE_WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Shard `index` of `size` of a stage.

    `n_heads` and `n_kv_heads` are the whole model's. Attention is cut by heads if each shard then
    has the same number of both; where there are fewer KV heads, several shards have the same one.
    Else every shard computes all of it, and has all keys and values.
    """

    index: int
    size: int
    n_heads: int
    n_kv_heads: int
    cuts_heads: bool

    @classmethod
    def of(cls, config: ModelConfig, index: int, size: int, *, has_whole_heads: bool) -> Cut:
        """Cut a model. With `has_whole_heads` its attention cannot be computed head by head."""
        heads, kv_heads = config.n_heads, config.n_kv_heads
        divides = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        return cls(
            index=index,
            size=size,
            n_heads=heads,
            n_kv_heads=kv_heads,
            cuts_heads=divides and not has_whole_heads,
        )

    def own_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model with the heads of this shard only."""
        if not self.cuts_heads:
            return config
        n_heads = self.n_heads // self.size
        return replace(config, n_heads=n_heads, n_kv_heads=self.n_own_kv_heads)

    @property
    def kv_heads(self) -> Range:
        """The KV heads of this shard, counted in the model."""
        return self.kv_heads_of(self.index)

    @property
    def n_own_kv_heads(self) -> int:
        """How many those are: the same in every shard."""
        begin, end = self.kv_heads
        return end - begin

    def kv_heads_of(self, index: int) -> Range:
        """Return the KV heads of any shard: see `kv_heads`."""
        if not self.cuts_heads:
            return 0, self.n_kv_heads
        begin = self.n_kv_heads * index // self.size
        return begin, max(begin + 1, self.n_kv_heads * (index + 1) // self.size)

    def cuts(self, axes: Sequence[Axis]) -> bool:
        """Say whether shards have different ones of what `axes` name; False for none."""
        return bool(axes) and (axes[0] is Axis.INNER or self.cuts_heads)

    def rows(self, n_rows: Sequence[int], axes: Sequence[Axis]) -> list[list[Range]]:
        """Return the rows of this shard of each of several weights with `n_rows` outputs each.

        `axes` say what their outputs are, one for each weight, or all for one: none for a linear
        whose outputs are gathered.
        """
        if not axes:
            return _overlaps(n_rows, [self._gathered_range(sum(n_rows))])
        if len(axes) == len(n_rows):
            return [self._segments(n, [axis]) for n, axis in zip(n_rows, axes, strict=True)]
        return _overlaps(n_rows, self._segments(sum(n_rows), axes))

    def _segments(self, total: int, axes: Sequence[Axis]) -> list[Range]:
        """Return the own range of each of several segments of outputs."""
        heads = {Axis.HEADS: self.n_heads, Axis.KV_HEADS: self.n_kv_heads, Axis.INNER: 1}
        unit = total // sum(heads[axis] for axis in axes)
        ranges, start = [], 0
        for axis in axes:
            begin, end = self._own(axis, unit)
            ranges.append((start + begin, start + end))
            start += unit * heads[axis]
        assert start == total, "the outputs are those of the axes"
        return ranges

    def _own(self, axis: Axis, unit: int) -> Range:
        if axis is Axis.INNER:
            ends = shares(unit, self.size)
            return ends[self.index], ends[self.index + 1]
        if axis is Axis.KV_HEADS:
            begin, end = self.kv_heads
            return begin * unit, end * unit
        each = self.n_heads // self.size * unit
        return self.index * each, (self.index + 1) * each

    def input_ends(self, n_in: int, axis: Axis | None) -> tuple[int, ...] | None:
        """Say where the parts of each shard's inputs end; None for inputs that are not cut."""
        if axis is None or not self.cuts((axis,)):
            return None
        if axis is Axis.INNER:
            return shares(n_in, self.size)
        return tuple(n_in * shard // self.size for shard in range(self.size + 1))

    def output_ends(self, n_out: int) -> tuple[int, ...] | None:
        """Say where the parts of gathered outputs end; None for outputs too few to be cut."""
        return shares(n_out, self.size) if n_out >= self.size else None

    def _gathered_range(self, n_out: int) -> Range:
        ends = self.output_ends(n_out)
        return (0, n_out) if ends is None else (ends[self.index], ends[self.index + 1])


def _overlaps(n_rows: Sequence[int], wanted: Sequence[Range]) -> list[list[Range]]:
    """Return which rows of each weight fall into ranges of the joined rows."""
    ends = [0]
    for n in n_rows:
        ends.append(ends[-1] + n)
    found = []
    for start, stop in pairwise(ends):
        inside = [(max(begin, start) - start, min(end, stop) - start) for begin, end in wanted]
        found.append([own for own in inside if own[0] < own[1]])
    return found
