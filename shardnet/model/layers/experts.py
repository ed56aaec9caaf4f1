"""A router and its experts, in the place of a layer's MLP.

Knows how experts are chosen and their answers added up. Must not know parameter names, stages or
who wants to know what was chosen.

A row's answer does not depend on the rows beside it, as far as products keep rows' bits: each
expert computes the rows that chose it in one product, and a row's answers are added in the order of
its own choice, one after the other.

Axes in shape comments: T rows of the micro-batch, E hidden size, X experts, K experts per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import Experts
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.modules import Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The experts that each row visits, the best first, and what their answers count."""

    experts: Tensor  # [T, K], int64
    weights: Tensor  # [T, K], float32


Router = Callable[[Tensor], Choice]
"""Chooses experts for the rows [T, E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouter:
    """The experts with the largest scores, by softmax; of equal ones the one with the smaller id.

    Scores of half precision are often equal, and torch.topk does not say which of them it takes.
    """

    gate: Linear
    top_k: int
    normalize: bool

    @classmethod
    def of(cls, config: Experts, gate: Linear) -> SoftmaxRouter:
        """Choose as the config says."""
        return cls(gate=gate, top_k=config.top_k, normalize=config.normalize_top_k)

    def __call__(self, hidden: Tensor) -> Choice:
        """Choose for every row. With `normalize` a row's weights add up to 1."""
        scores = self.gate(hidden).float()  # [T, X]
        best, experts = best_experts(scores, self.top_k)
        if self.normalize:
            return Choice(experts=experts, weights=best.softmax(-1))
        return Choice(experts=experts, weights=scores.softmax(-1).gather(-1, experts))


def best_experts(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest of [T, X] scores and whose they are, the smaller id at a tie."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    return ranked.values[:, :top_k], ranked.indices[:, :top_k]


def best_groups(scores: Tensor, group_scores: Tensor, top_groups: int, out: float) -> Tensor:
    """Leave of the scores [T, X] those of the best groups, by [T, groups]; the others become `out`.

    Of equal groups the first.
    """
    n_groups = group_scores.shape[-1]
    if top_groups == n_groups:
        return scores
    _, best = best_experts(group_scores, top_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return scores.masked_fill(is_out.repeat_interleave(scores.shape[-1] // n_groups, -1), out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """The experts of one layer behind their router, and one that every row visits, or None."""

    router: Router
    experts: Sequence[Mlp]
    shared: Mlp | None = None

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run every row through its experts: [T, E] in and out, and the experts [T, K]."""
        choice = self.router(hidden)
        n_rows, top_k = choice.experts.shape
        visits = choice.experts.flatten()  # [T x K]
        places = visits.argsort(stable=True)  # by expert, then by row
        rows = places // top_k
        answers = hidden.new_empty(n_rows * top_k, hidden.shape[-1])
        start = 0
        for expert, n_visits in enumerate(visits.bincount(minlength=len(self.experts)).tolist()):
            if n_visits == 0:
                continue
            asked = hidden.index_select(0, rows.narrow(0, start, n_visits))
            answers.index_copy_(0, places.narrow(0, start, n_visits), self.experts[expert](asked))
            start += n_visits
        total = _add_up(answers.view(n_rows, top_k, -1), choice.weights)
        if self.shared is not None:
            total = total + self.shared(hidden)
        return total, choice.experts


def _add_up(answers: Tensor, weights: Tensor) -> Tensor:
    """Add [T, K, E] answers up by their weights [T, K], in float32: [T, E] in the answers' dtype.

    One after the other: the order within a sum over K could depend on how many rows there are.
    """
    total = answers.new_zeros(answers.shape[0], answers.shape[2], dtype=torch.float32)
    for place in range(answers.shape[1]):
        total += answers[:, place] * weights[:, place, None]
    return total.to(answers.dtype)
