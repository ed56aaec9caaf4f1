"""The linears, norms and tables of one shard of a stage.

Knows which rows of which parameter a shard has, and what is gathered around a linear. Must not know
how parameters are read (weights.py), nor how shards reach each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardnet.model.families.tensor_shapes import Table as Shapes
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.tables import Table
from shardnet.model.shards.cut import Axis, Cut
from shardnet.model.shards.gathered import GatheredLinear, GatheredTable
from shardnet.model.shards.group import ShardGroup
from shardnet.stage.weights import StageWeights


class ShardWeights:
    """The WeightSource of one shard: `weights`, cut as `cut` says.

    Norms, routers and other parameters that are never quantised are whole in every shard.
    """

    def __init__(self, weights: StageWeights, shapes: Shapes, cut: Cut, group: ShardGroup) -> None:
        """Take the source of the whole stage, whose parameters have these `shapes`."""
        self._weights = weights
        self._shapes = shapes
        self._cut = cut
        self._group = group
        self._kept: set[str] = set()
        """Parameters of which rows were chosen: a tied table is asked for twice."""

    def linear(
        self,
        *names: str,
        transposed: bool = False,
        precise: bool = False,
        wide: bool = False,
        outputs: Sequence[Axis] = (),
        inputs: Axis | None = None,
    ) -> Linear:
        """See WeightSource."""
        if precise or wide:
            return self._weights.linear(*names, transposed=transposed, precise=precise, wide=wide)
        axes = outputs if self._cut.cuts(outputs) else ()
        n_outs = [self._shapes[f"{name}.weight"][1 if transposed else 0] for name in names]
        ranges = self._cut.rows(n_outs, axes)
        own = [name for name, some in zip(names, ranges, strict=True) if some]
        for name, some in zip(names, ranges, strict=True):
            for kind, axis in (("weight", 1 if transposed else 0), ("bias", 0)):
                self._keep(f"{name}.{kind}", some, axis)
        linear = self._weights.linear(*own, transposed=transposed)
        in_ends = self._cut.input_ends(linear.shape[1], inputs)
        out_ends = None if axes else self._cut.output_ends(sum(n_outs))
        if in_ends is None and out_ends is None:
            return linear
        return GatheredLinear(linear, self._group, in_ends, out_ends)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """See WeightSource."""
        return self._weights.norm(name, eps, offset)

    def table(self, name: str) -> Table:
        """See WeightSource."""
        weight = f"{name}.weight"
        n_rows, width = self._shapes[weight]
        ends = self._cut.output_ends(n_rows)
        if ends is None:
            return self._weights.table(name)
        self._keep(weight, self._cut.rows([n_rows], ())[0], 0)
        return GatheredTable(self._weights.table(name), self._group, ends, width)

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        self._keep_of(f"{name}.weight", rows)
        return self._weights.matrix(name)

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        self._keep_of(name, rows)
        return self._weights.parameter(name)

    def _keep_of(self, name: str, rows: Axis | None) -> None:
        if rows is not None and self._cut.cuts((rows,)):
            self._keep(name, self._cut.rows([self._shapes[name][0]], (rows,))[0], 0)

    def _keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """Have only `ranges` of a parameter read, if the stage has it."""
        if name in self._shapes and name not in self._kept:
            self._kept.add(name)
            self._weights.keep(name, ranges, axis)
