"""Tables whose rows are looked up: embeddings of tokens and positions.

Must not know files, nor who looks up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.kernels.panels import Panels, look_up

RowsOf = Callable[[Tensor], Tensor]
"""Says which rows token ids [T], int64 on the CPU, need: [T, any]."""


class Table(Protocol):
    """A table of rows [N, E], in the compute dtype."""

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T], integers on the table's device: a new tensor [T, E]."""


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
