"""Routers that choose among groups of experts, as DeepSeek does.

Knows how scores become a choice. Must not know parameter names or stages.

Axes in shape comments: T rows of the micro-batch, E hidden size, X experts, K experts per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.model_config import Experts
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.experts import ExpertChoice, best_experts, best_groups
from shardnet.model.layers.norms import row_sigmoid, row_softmax

_CLOSE: Final = 0.02
"""Twice the jitter that Phi-3.5-MoE is trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxGroupRouter:
    """Choose by softmax, in the groups whose best expert scores highest (DeepSeek-V2)."""

    experts: Experts
    gate: Linear

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Choose experts for each row of the hidden states [T, E]."""
        config = self.experts
        scores = row_softmax(self.gate(hidden.float()))  # [T, X]
        group_scores = scores.view(len(scores), config.n_groups, -1).amax(-1)
        left = best_groups(scores, group_scores, config.top_groups, 0.0)
        weights, experts = best_experts(left, config.top_k)
        return ExpertChoice(experts=experts, weights=weights * config.output_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTwoRouter:
    """Choose in the groups whose two best experts score highest (DeepSeek-V3).

    Scores are sigmoids, or a softmax with `has_softmax`. `bias`, if any, is added for the choice
    alone.
    """

    experts: Experts
    gate: Linear
    bias: Tensor | None  # [X], float32
    has_softmax: bool = False

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Choose experts for each row of the hidden states [T, E]."""
        config = self.experts
        logits = self.gate(hidden.float())
        scores = row_softmax(logits) if self.has_softmax else row_sigmoid(logits)  # [T, X]
        biased = (scores if self.bias is None else scores + self.bias).contiguous()
        best_two = biased.view(len(biased), config.n_groups, -1).topk(2, -1).values
        left = best_groups(biased, best_two.sum(-1), config.top_groups, -torch.inf)
        _, experts = best_experts(left, config.top_k)
        weights = scores.gather(-1, experts)
        if config.normalize_top_k:
            weights = weights / (_row_sum(weights) + 1e-20)
        return ExpertChoice(experts=experts, weights=weights * config.output_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedLogitsRouter:
    """Choose by logits with a bias, and weigh by the sigmoids of those without (Kolibri)."""

    experts: Experts
    gate: Linear
    bias: Tensor  # [X], float32

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Choose experts for each row of the hidden states [T, E]."""
        logits = self.gate(hidden.float())  # [T, X]
        _, experts = best_experts(logits + self.bias, self.experts.top_k)
        weights = row_sigmoid(logits.gather(-1, experts))
        if self.experts.normalize_top_k:
            weights = weights / _row_sum(weights)
        return ExpertChoice(experts=experts, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMixerRouter:
    """Choose the best expert, then the best of the others (Phi-3.5-MoE, arXiv 2409.12136).

    Each one's weight is its share among those whose scores are close to it.
    """

    gate: Linear

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Choose two experts for each row of the hidden states [T, E]."""
        scores = self.gate(hidden).float()  # [T, X]
        left, experts, weights = scores, [], []
        for _ in range(2):
            best, expert = best_experts(left, 1)  # [T, 1] each
            is_far = (best - scores) / scores.abs().maximum(best) > _CLOSE
            shares = row_softmax(left.masked_fill(is_far, -torch.inf))
            experts.append(expert)
            weights.append(shares.gather(-1, expert))
            left = left.scatter(-1, expert, -torch.inf)
        return ExpertChoice(experts=torch.cat(experts, -1), weights=torch.cat(weights, -1))


def _row_sum(weights: Tensor) -> Tensor:
    """Sum [T, K] to [T, 1] in an order that does not depend on T."""
    total = weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + weights[:, place : place + 1]
    return total
