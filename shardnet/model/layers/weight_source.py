"""Where a family's layers get their parameters from.

Knows what a layer may ask for. Must not know files, dtypes of kernels or where weights are kept.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.norms import Norm


class WeightSource(Protocol):
    """Hands out the parameters of a stage by name: of a checkpoint, or synthetic ones."""

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Join the parameters `NAME.weight` (and `NAME.bias`, where the model has it).

        `precise` keeps them as they are where products are rounded, `wide` is also in float32
        whatever else is computed in.
        """

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and, where the model has it, `NAME.bias`.

        An `offset` is added to the weight, in float32, where the norm stays.
        """

    def table(self, name: str) -> Tensor:
        """Give `NAME.weight` as it is: [rows, E] in the compute dtype."""

    def parameter(self, name: str) -> Tensor:
        """Give the parameter of this whole name as it is, in float32."""
