"""Leaf layers that families share: norms and nonlinearities.

Knows shapes, not parameter names. Must not know wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.model_config import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm, or LayerNorm where there is a bias: [T, E] in and out, each row by itself.

    A weight wider than the rows is applied before rounding (Gemma).
    """

    weight: Tensor  # [E]
    bias: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalize every row."""
        if self.bias is not None:
            return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)
        if self.weight.dtype is hidden.dtype:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        wide = hidden.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMSNorm over each head of queries and keys, which stand side by side: [T, H + KV heads, D].

    A weight wider than the rows is applied before rounding (Gemma).
    """

    weight: Tensor  # [H + KV heads, D]
    eps: float

    @classmethod
    def join(cls, queries: Norm, keys: Norm, n_heads: int, n_kv_heads: int) -> HeadNorm:
        """Make one of the two norms that a checkpoint has."""
        parts = (queries.weight.expand(n_heads, -1), keys.weight.expand(n_kv_heads, -1))
        return cls(weight=torch.cat(parts), eps=queries.eps)

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize every head."""
        wide = heads.to(self.weight.dtype)
        normed = F.rms_norm(wide, self.weight.shape[-1:], None, self.eps)
        return normed.mul_(self.weight).to(heads.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNorm:
    """RMSNorm over all heads of the queries, and one over all heads of the keys."""

    n_heads: int
    queries: Norm  # [H x D]
    keys: Norm  # [KV heads x D]

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize each row of the heads [T, H + KV heads, D], queries first: same shape."""
        queries = self.queries(heads[:, : self.n_heads].flatten(1))
        keys = self.keys(heads[:, self.n_heads :].flatten(1))
        return torch.cat((queries, keys), -1).view_as(heads)


def activate(kind: Activation, hidden: Tensor) -> Tensor:
    """Apply the MLP's nonlinearity, elementwise."""
    match kind:
        case Activation.SILU:
            return F.silu(hidden)
        case Activation.GELU:
            return F.gelu(hidden)
        case Activation.GELU_NEW | Activation.GELU_TANH:
            return F.gelu(hidden, approximate="tanh")
        case Activation.RELU:
            return F.relu(hidden)


def row_sigmoid(rows: Tensor) -> Tensor:
    """Apply the sigmoid to [T, N], so that a row's bits do not depend on the other rows.

    torch computes the last elements of what lies in one piece by another formula than the rest: the
    result has a gap behind each row, so that every row ends for itself.
    """
    n_rows, width = rows.shape
    apart = rows.new_empty(n_rows, width + 1)[:, :width]
    return torch.sigmoid(rows, out=apart)
