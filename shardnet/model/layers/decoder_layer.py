"""The two halves of a decoder layer, each added to what went into it: attention, then the MLP.

Knows what stands around a half in any family, and where a half can be cut. Must not know how a
family names its parameters, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.layers.attention import Step
from shardnet.model.layers.experts import SparseMlp
from shardnet.model.layers.modules import Attention, GatedMlp
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary


class Half(Protocol):
    """Half a layer, with what is added to its input."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How a half is joined to what went in: the norms before and after it, and a factor."""

    before: Norm | None = None
    after: Norm | None = None
    multiplier: float = 1.0

    @property
    def is_rms(self) -> bool:
        """Whether the norms are RMSNorms, as far as there are any."""
        return all(norm is None or norm.bias is None for norm in (self.before, self.after))

    def enter(self, hidden: Tensor) -> Tensor:
        """Make of the layer's rows [T, E] what the half works on."""
        return hidden if self.before is None else self.before(hidden)

    def add(self, hidden: Tensor, inner: Tensor) -> Tensor:
        """Add what the half made, [T, E], to what went in."""
        if self.after is not None:
            inner = self.after(inner)
        if self.multiplier == 1:
            return hidden + inner
        return torch.add(hidden, inner, alpha=self.multiplier)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHalf:
    """Attention over a slot's keys."""

    residual: Residual
    self_attn: Attention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""
        attended = self.self_attn(self.residual.enter(hidden), index, rotary, step)
        return self.residual.add(hidden, attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpHalf:
    """The same MLP for every row."""

    residual: Residual
    mlp: GatedMlp

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""
        return self.residual.add(hidden, self.mlp(self.residual.enter(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseHalf:
    """Experts, a few for each row."""

    residual: Residual
    mlp: SparseMlp

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run it, in the layer `index` within the stage: [T, E] in and out."""
        inner, experts = self.mlp(self.residual.enter(hidden))
        step.tell_experts(index, experts)
        return self.residual.add(hidden, inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: one half, then the other."""

    attention: Half
    mlp: Half

    @classmethod
    def of(
        cls,
        attention: Residual,
        self_attn: Attention,
        around_mlp: Residual,
        mlp: GatedMlp | SparseMlp,
    ) -> Layer:
        """Put a layer together from what its halves work with and what stands around them."""
        second: Half
        if isinstance(mlp, SparseMlp):
            second = SparseHalf(residual=around_mlp, mlp=mlp)
        else:
            second = MlpHalf(residual=around_mlp, mlp=mlp)
        return cls(attention=AttentionHalf(residual=attention, self_attn=self_attn), mlp=second)

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        return self.mlp(self.attention(hidden, index, rotary, step), index, rotary, step)
