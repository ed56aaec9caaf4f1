"""A stage on one node that computes as if its parts had travelled between several.

For measuring what a narrower dtype of parts costs. Must not know links.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from shardnet.model.kernels.codec import pack_rows, unpack_rows
from shardnet.model.shards.cut import shares
from shardnet.model.shards.group import GatherStruct, PythonGather
from shardnet.types import WireDType


class RoundedGroup:
    """The only shard of a stage, whose columns are rounded as parts of `n_nodes` to `wire`.

    It implements ShardGroup.
    """

    index = 0
    size = 1

    def __init__(self, wire: WireDType, n_nodes: int) -> None:
        self._wire = wire
        self._n_nodes = n_nodes
        self._native = PythonGather(self)

    @property
    def struct(self) -> GatherStruct:
        """See ShardGroup."""
        return self._native.struct

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """Return all columns, rounded part by part."""
        whole, n_rows = part.clone(), part.shape[0]
        n_nodes = min(self._n_nodes, ends[-1])
        for begin, end in pairwise(shares(ends[-1], n_nodes)):
            if n_rows and begin < end:
                payload = pack_rows(part[:, begin:end], self._wire)
                whole[:, begin:end] = unpack_rows(
                    payload, self._wire, n_rows, end - begin, part.device
                )
        return whole

    def check(self) -> None:
        """Raise what could not be rounded: an activation that does not fit the wire."""
        self._native.raise_error()
