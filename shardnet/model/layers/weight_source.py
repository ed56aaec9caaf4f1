"""The interface through which a family's layers get their parameters, and tables to look up in.

Knows what a layer may ask for. Must not know files, dtypes of kernels or where weights are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig, NormKind
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panels import Panels, look_up
from shardnet.model.layers.norms import BareNorm, Norm
from shardnet.model.shards.cut import Axis

Text = tuple[Tensor, int]
"""Token ids, of which so many stand before those of a step."""


class RowsOf(Protocol):
    """Says which rows token ids need."""

    def __call__(self, ids: Tensor, n_before: int = 0) -> Tensor:
        """Return the rows of `ids` [T], int64 on the CPU, but for the first: [T - n_before, any].

        With them a text begins, or goes on with those behind the first `n_before`.
        """


class Table(Protocol):
    """A table of rows [N, E], in the compute dtype."""

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T], integers on the table's device: a new tensor [T, E]."""


class StoredTable(Table, Protocol):
    """A table whose rows stay where they are stored."""

    def bring(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the rows that texts of a step need, as `rows_of` says.

        Those of all tables of a stage come at once, if they have to come far.
        """


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A table in the compute dtype."""

    table: Tensor  # [N, E]

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T]: a new tensor [T, E]."""
        return self.table.index_select(0, ids)


@dataclass(frozen=True, slots=True)
class PanelTable:
    """A table of packed weights, unpacked to `dtype` row by row."""

    panels: Panels
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T]: a new tensor [T, E]."""
        return look_up(self.panels, ids, self.dtype)


class LinearOptions(TypedDict, total=False):
    """How a linear is made.

    `transposed`: weights are stored as [K, N] (GPT-2's Conv1D). `precise`: never quantise them.
    `wide`: also compute in float32, whatever the compute dtype.

    Where the stage is cut over shards, `outputs` say what the outputs are, in order, and each shard
    gets its own ones; without them all shards get all outputs. `inputs` say what the inputs are:
    each shard gives its own ones.
    """

    transposed: bool
    precise: bool
    wide: bool
    outputs: Sequence[Axis]
    inputs: Axis | None


class WeightSource(Protocol):
    """Provides the parameters of a stage by name: from a checkpoint, or synthetic ones."""

    def linear(self, *names: str, **how: Unpack[LinearOptions]) -> Linear:
        """Make one linear layer of the concatenated `NAME.weight` (and `NAME.bias`, if present)."""

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and `NAME.bias`, if present: [E] each.

        A nonzero `offset` is added to the weight, which stays in float32 then.
        """

    def table(self, name: str) -> Table:
        """Return `NAME.weight` to look up rows in."""

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """Return the rows of all `NAME.weight`, to look up where they are stored.

        They are not loaded: what is looked up is read from the file each time, and before that
        where tokens are known early, of which `rows_of` says what they need.
        """

    def token_classes(self) -> Tensor:
        """Return of each token id which class it is of, whose texts are alike: int64 on the CPU."""

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Return `NAME.weight`: [N, K] in the compute dtype; of a shard its own `rows`, if said."""

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Return the parameter with the full name `name`, in float32; of a shard as `matrix`."""


def load_norm(config: ModelConfig, weights: WeightSource, name: str) -> Norm | BareNorm:
    """Take the norm `name` over the hidden size, of the kind that the config says."""
    kind = config.norm_kind
    if kind in (NormKind.BARE, NormKind.BARE_CENTRED):
        return BareNorm(eps=config.norm_eps, is_centred=kind is NormKind.BARE_CENTRED)
    norm = weights.norm(name, config.norm_eps, config.norm_offset)
    if kind is NormKind.CENTRED:
        return replace(norm, bias=norm.weight.new_zeros(norm.weight.shape))
    return norm


class WholeSource(WeightSource, Protocol):
    """A source of whole parameters, of which less may be taken."""

    def keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """Take no more of a parameter than `ranges` of an axis, in the place of all of it."""
