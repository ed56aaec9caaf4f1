"""Linears of a stage that the next stage on this node has too, so that they are not read again.

Knows by what a linear is asked for. Must not know files, nor which stages are alike enough.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from shardnet.model.kernels.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKey:
    """What a family asks of a WeightSource for one linear."""

    names: tuple[str, ...]
    transposed: bool
    precise: bool
    wide: bool


@dataclass(slots=True, kw_only=True, eq=False)
class KeptLinears:
    """Linears by what they were asked for, and the rows up to which they are batch-invariant."""

    exact_rows: int
    linears: dict[LinearKey, Linear] = field(default_factory=dict)

    def drop_others(self, tensors: Container[str]) -> None:
        """Drop the linears of which a weight is not among `tensors`, to free their memory."""
        for key in [*self.linears]:
            if not all(f"{name}.weight" in tensors for name in key.names):
                del self.linears[key]
