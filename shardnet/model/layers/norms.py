"""Leaf layers that families share: norms and nonlinearities.

Knows shapes, not parameter names. Must not know wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.arithmetic.row_functions import (
    activated_rows,
    normed_rows,
    sigmoid_rows,
    softmax_rows,
    softplus_rows,
)
from shardnet.model.config.model_config import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm, or LayerNorm if there is a bias: [T, E] in and out, each row by itself.

    A weight of a wider dtype than the rows is applied before the result is rounded (Gemma).
    """

    weight: Tensor  # [E]
    bias: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalize every row."""
        native = normed_rows(hidden, self.weight, self.eps, self.bias)
        if native is not None:
            return native
        wide, shape = hidden.to(self.weight.dtype), self.weight.shape
        if self.bias is not None:
            normed = F.layer_norm(wide, shape, self.weight, self.bias, self.eps)
        else:
            normed = F.rms_norm(wide, shape, self.weight, self.eps)
        return normed.to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BareNorm:
    """RMSNorm, or LayerNorm if `is_centred`, of which nothing is stored: [..., E] in and out."""

    eps: float
    is_centred: bool = False

    @property
    def per_head(self) -> None:
        """None: it has no weights for a fused sub-layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalize every row; of heads [T, H, D] every head."""
        rows, width = hidden.reshape(-1, hidden.shape[-1]), hidden.shape[-1]
        weight, bias = _ones_zeros(width, rows.device) if self.is_centred else (None, None)
        native = normed_rows(rows, weight, self.eps, bias)
        if native is not None:
            return native.view(hidden.shape)
        if self.is_centred:
            normed = F.layer_norm(rows.float(), (width,), None, None, self.eps)
        else:
            normed = F.rms_norm(rows.float(), (width,), None, self.eps)
        return normed.to(hidden.dtype).view(hidden.shape)


@lru_cache(maxsize=8)
def _ones_zeros(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones(width, device=device), torch.zeros(width, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMSNorm over each head of concatenated queries and keys: [T, H + KV heads, D].

    With weights for 2 KV heads each it normalizes values too. A weight of a wider dtype than the
    rows is applied before the result is rounded (Gemma). If `is_centred` it is LayerNorm.
    """

    weight: Tensor  # [H + KV heads, D]
    eps: float
    is_centred: bool = False

    @classmethod
    def join(cls, queries: Norm, keys: Norm, n_heads: int, n_kv_heads: int) -> HeadNorm:
        """Join the checkpoint's norms of queries and of keys, [D] each."""
        parts = (queries.weight.expand(n_heads, -1), keys.weight.expand(n_kv_heads, -1))
        return cls(weight=torch.cat(parts), eps=queries.eps)

    @property
    def per_head(self) -> HeadNorm | None:
        """This norm, unless it is LayerNorm."""
        return None if self.is_centred else self

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize every head."""
        if self.is_centred:
            wide = BareNorm(eps=self.eps, is_centred=True)(heads.float())
            return wide.mul_(self.weight).to(heads.dtype)
        native = normed_rows(heads.reshape(-1, heads.shape[-1]), self.weight, self.eps)
        if native is not None:
            return native.view(heads.shape)
        wide = heads.to(self.weight.dtype)
        normed = F.rms_norm(wide, self.weight.shape[-1:], None, self.eps)
        return normed.mul_(self.weight).to(heads.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNorm:
    """RMSNorm over all heads of the queries, and one over all heads of the keys."""

    n_heads: int
    queries: Norm  # [H x D]
    keys: Norm  # [KV heads x D]

    @property
    def per_head(self) -> None:
        """None: it normalizes over all heads."""

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalize each row of the heads [T, H + KV heads, D], queries first: same shape."""
        queries = self.queries(heads[:, : self.n_heads].flatten(1))
        keys = self.keys(heads[:, self.n_heads :].flatten(1))
        return torch.cat((queries, keys), -1).view_as(heads)


class Xielu:
    """The nonlinearity of arXiv 2411.13010, whose numbers are a layer's own (Apertus)."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        """Take the stored numbers."""
        slope = beta.item()
        above, below = (F.softplus(alpha).item() for alpha in (alpha_p, alpha_n))
        self.above = above
        self.below = slope + below
        self.slope = slope
        self.eps = eps.item()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Apply it to [T, N], in float32, row by row: see row_sigmoid."""
        return torch.stack([self._row(row.float()) for row in hidden]).to(hidden.dtype)

    def _row(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * self.below
        return torch.where(x > 0, x * x * self.above, below) + x * self.slope


def activate(kind: Activation | Xielu, hidden: Tensor) -> Tensor:
    """Apply the MLP's nonlinearity, elementwise, to [T, N]."""
    if isinstance(kind, Xielu):
        return kind(hidden)
    native = activated_rows(kind, hidden)
    if native is not None:
        return native
    match kind:
        case Activation.SILU:
            return F.silu(hidden)
        case Activation.GELU:
            if hidden.device.type == "cpu" and len(hidden) > 1:  # see row_sigmoid
                return torch.stack([F.gelu(row) for row in hidden])
            return F.gelu(hidden)
        case Activation.GELU_NEW | Activation.GELU_TANH:
            return F.gelu(hidden, approximate="tanh")
        case Activation.GELU_QUICK:
            return hidden * row_sigmoid(1.702 * hidden)
        case Activation.RELU:
            return F.relu(hidden)
        case Activation.RELU_SQUARED:
            return F.relu(hidden).square_()


def row_softplus(rows: Tensor) -> Tensor:
    """Apply the softplus to [T, N] in float32, batch-invariantly: see row_sigmoid."""
    native = softplus_rows(rows)
    if native is not None:
        return native
    return torch.stack([F.softplus(row.float()) for row in rows]).to(rows.dtype)


def row_sigmoid(rows: Tensor) -> Tensor:
    """Apply the sigmoid to [T, N], batch-invariantly.

    torch computes the last elements of contiguous memory by another formula than the rest: a gap
    after each row of the result makes every row end on its own.
    """
    native = sigmoid_rows(rows)
    if native is not None:
        return native
    n_rows, width = rows.shape
    apart = rows.new_empty(n_rows, width + 1)[:, :width]
    return torch.sigmoid(rows, out=apart)


def row_softmax(rows: Tensor) -> Tensor:
    """Take the softmax of each row [T, N]."""
    native = softmax_rows(rows)
    return rows.softmax(-1) if native is None else native
