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
from fractions import Fraction
from itertools import accumulate, pairwise

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


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Share out `total` things by `weights`: where each share begins, and the end.

    Every share has at least one; what is over goes one by one to the share that is then smallest
    for its weight (D'Hondt's method), of equal ones to the first. There are as many things as
    weights at least.
    """
    counts = [max(1, total * weight // sum(weights)) for weight in weights]
    while sum(counts) < total:
        counts[min(_by_weight(counts, weights, more=1))[1]] += 1
    while sum(counts) > total:  # shares of none became one
        counts[max(each for each in _by_weight(counts, weights) if counts[each[1]] > 1)[1]] -= 1
    return (0, *accumulate(counts))


def _by_weight(
    counts: Sequence[int], weights: Sequence[int], more: int = 0
) -> list[tuple[Fraction, int]]:
    both = zip(counts, weights, strict=True)
    return [(Fraction(count + more, weight), n) for n, (count, weight) in enumerate(both)]


def shares(total: int, n_shards: int, weights: Sequence[int] = ()) -> tuple[int, ...]:
    """Cut `total` columns into parts: where each begins, and the end; `n_shards` + 1 numbers.

    Parts are as large as `weights` say, () for equal ones. Whole panels of 16 outputs, where there
    are enough of them. Raises UsageError for more shards than columns.
    """
    if total < n_shards:
        raise UsageError(
            f"{total} columns cannot be cut over {n_shards} shards",
            remedy="name fewer devices, or lower --tensor-parallel",
        )
    n_panels = -(-total // PANEL)
    if len(set(weights)) > 1:
        if n_panels < n_shards:
            return apportion(total, weights)
        return tuple(min(total, PANEL * end) for end in apportion(n_panels, weights))
    if n_panels < n_shards:
        return tuple(total * shard // n_shards for shard in range(n_shards + 1))
    return tuple(
        min(total, PANEL * (n_panels * shard // n_shards)) for shard in range(n_shards + 1)
    )


def stays_whole(n_out: int, n_in: int) -> bool:
    """Say whether a linear or table [n_out, n_in] is too small to be cut by itself."""
    return n_out * n_in <= WHOLE_WEIGHTS


def head_ends(n_heads: int, n_kv_heads: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Say where the query heads of each shard begin, and the end; () where all compute all of them.

    A shard has all query heads of some KV heads. Where there are fewer KV heads than shards it has
    some query heads of one KV head, which others have too.
    """
    size, each = len(weights), n_heads // n_kv_heads
    if n_kv_heads >= size:
        return tuple(each * end for end in apportion(n_kv_heads, weights))
    of_shard: list[int] = []
    for shard, end in enumerate(accumulate(weights)):
        middle = (2 * end - weights[shard]) * n_kv_heads // (2 * sum(weights))
        following = of_shard[-1] + 1 if of_shard else 0
        of_shard.append(max(n_kv_heads - size + shard, min(middle, following)))
    ends = [0]
    for head in range(n_kv_heads):
        same = [weight for weight, own in zip(weights, of_shard, strict=True) if own == head]
        if len(same) > each:
            return ()
        ends += [head * each + end for end in apportion(each, same)[1:]]
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Shard `index` of a stage, of which each has a share by its weight; `n_heads` and `n_kv_heads`
    are the whole model's.

    Attention is cut at `head_ends`: query heads of whole KV heads, or of one that other shards have
    too. () where every shard computes all of it, and has all keys and values.
    """

    index: int
    weights: tuple[int, ...]
    n_heads: int
    n_kv_heads: int
    head_ends: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        index: int,
        size: int,
        weights: Sequence[int] = (),
        *,
        has_whole_heads: bool,
    ) -> Cut:
        """Cut a model into equal shares, or by `weights`.

        With `has_whole_heads` its attention cannot be computed head by head.
        """
        heads, own = (config.n_heads, config.n_kv_heads), tuple(weights) or (1,) * size
        return cls(
            index=index,
            weights=own,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_ends=() if has_whole_heads else head_ends(*heads, own),
        )

    @property
    def size(self) -> int:
        """How many shards there are."""
        return len(self.weights)

    @property
    def cuts_heads(self) -> bool:
        """Whether shards have different heads."""
        return bool(self.head_ends)

    @property
    def heads(self) -> Range:
        """The query heads of this shard, counted in the model."""
        ends = self.head_ends
        return (ends[self.index], ends[self.index + 1]) if ends else (0, self.n_heads)

    def share(self, of_heads: Fraction) -> Fraction:
        """Return what this shard has of a layer's weights at most, of which `of_heads` are those of
        queries, keys and values: heads may be cut less evenly than what has more columns.
        """
        begin, end = self.heads
        share = Fraction(self.weights[self.index], sum(self.weights))
        return share + of_heads * max(Fraction(), Fraction(end - begin, self.n_heads) - share)

    def own_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model with the heads of this shard only."""
        if not self.cuts_heads:
            return config
        begin, end = self.heads
        return replace(config, n_heads=end - begin, n_kv_heads=self.n_own_kv_heads)

    @property
    def kv_heads(self) -> Range:
        """The KV heads of this shard, counted in the model."""
        return self.kv_heads_of(self.index)

    @property
    def n_own_kv_heads(self) -> int:
        """How many those are."""
        begin, end = self.kv_heads
        return end - begin

    def kv_heads_of(self, index: int) -> Range:
        """Return the KV heads of any shard: see `kv_heads`."""
        if not self.cuts_heads:
            return 0, self.n_kv_heads
        begin, end = self.head_ends[index : index + 2]
        each = self.n_heads // self.n_kv_heads
        return begin // each, -(-end // each)

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
            ends = shares(unit, self.size, self.weights)
            return ends[self.index], ends[self.index + 1]
        if axis is Axis.KV_HEADS:
            begin, end = self.kv_heads
            return begin * unit, end * unit
        begin, end = self.heads
        return begin * unit, end * unit

    def input_ends(self, n_in: int, axis: Axis | None) -> tuple[int, ...] | None:
        """Say where the parts of each shard's inputs end; None for inputs that are not cut."""
        if axis is None or not self.cuts((axis,)):
            return None
        if axis is Axis.INNER:
            return shares(n_in, self.size, self.weights)
        return tuple(n_in // self.n_heads * end for end in self.head_ends)

    def output_ends(self, n_out: int) -> tuple[int, ...] | None:
        """Say where the parts of gathered outputs end; None for outputs too few to be cut."""
        return shares(n_out, self.size, self.weights) if n_out >= self.size else None

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
