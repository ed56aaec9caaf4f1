"""The interface through which a family's layers get their parameters.

Knows what a layer may ask for. Must not know files, dtypes of kernels or where weights are stored.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.tables import Table


class WeightSource(Protocol):
    """Provides the parameters of a stage by name: from a checkpoint, or synthetic ones."""

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Make one linear layer of the concatenated `NAME.weight` (and `NAME.bias`, if present).

        `transposed`: weights are stored as [K, N] (GPT-2's Conv1D). `precise`: never quantise them.
        `wide`: also compute in float32, whatever the compute dtype.
        """

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and `NAME.bias`, if present: [E] each.

        A nonzero `offset` is added to the weight, which stays in float32 then.
        """

    def table(self, name: str) -> Table:
        """Return `NAME.weight` to look up rows in."""

    def matrix(self, name: str) -> Tensor:
        """Return `NAME.weight`: [N, K] in the compute dtype."""

    def parameter(self, name: str) -> Tensor:
        """Return the parameter with the full name `name`, in float32."""
