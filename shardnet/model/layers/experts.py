"""A router and its experts, in place of a layer's MLP, and experts that are no usual gated MLP.

Knows how experts are chosen and their outputs combined. Must not know parameter names, stages or
who records the routing.

The result is batch-invariant as far as the linear layers are: each expert computes the rows routed
to it in one matmul, and a row's expert outputs are added one by one, in the order of its routing.

Axes in shape comments: T rows of the micro-batch, E hidden size, X experts, K experts per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.model_config import Activation, Experts
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.modules import GatedMlp, Mlp, TwoLayerMlp
from shardnet.model.layers.norms import Norm, activate, row_sigmoid, row_softmax, row_softplus
from shardnet.model.shards.gathered import multiply_each


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """The experts of each row, the best first, and the weights of their outputs."""

    experts: Tensor  # [T, K], int64
    weights: Tensor  # [T, K], float32


Router = Callable[..., ExpertChoice]
"""Routes hidden states [T, E] to experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouter:
    """Route to the experts with the largest softmax scores; ties go to the smaller id.

    Scores in half precision are often equal, and torch.topk leaves the order of ties open.
    """

    gate: Linear
    top_k: int
    normalize: bool

    @classmethod
    def of(cls, config: Experts, gate: Linear) -> SoftmaxRouter:
        """Take top-k and normalization from the config."""
        return cls(gate=gate, top_k=config.top_k, normalize=config.normalize_top_k)

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Route hidden states [T, E]. With `normalize` a row's weights add up to 1."""
        scores = self.gate(hidden).float()  # [T, X]
        best, experts = best_experts(scores, self.top_k)
        if self.normalize:
            return ExpertChoice(experts=experts, weights=row_softmax(best))
        return ExpertChoice(experts=experts, weights=row_softmax(scores).gather(-1, experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRouter:
    """Route normalized rows, and multiply the weight of each expert by its own number (Gemma 4)."""

    norm: Norm
    router: SoftmaxRouter
    scales: Tensor  # [X], float32

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Route hidden states [T, E]."""
        choice = self.router(self.norm(hidden))
        return replace(choice, weights=choice.weights * self.scales[choice.experts])


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouter:
    """Route to the experts with the largest scores, weighted by their sigmoids (Llama 4)."""

    gate: Linear
    top_k: int

    def __call__(self, hidden: Tensor) -> ExpertChoice:
        """Route hidden states [T, E]."""
        best, experts = best_experts(self.gate(hidden).float(), self.top_k)
        return ExpertChoice(experts=experts, weights=row_sigmoid(best))


def best_experts(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest of scores [T, X] and their experts, ties by the smaller id.

    Both are [T, K], the experts int64.
    """
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    return ranked.values[:, :top_k], ranked.indices[:, :top_k]


def best_groups(scores: Tensor, group_scores: Tensor, top_groups: int, out: float) -> Tensor:
    """Keep of scores [T, X] those of the best groups, by [T, groups]; set all others to `out`.

    Ties go to the first group.
    """
    n_groups = group_scores.shape[-1]
    if top_groups == n_groups:
        return scores
    _, best = best_experts(group_scores, top_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return scores.masked_fill(is_out.repeat_interleave(scores.shape[-1] // n_groups, -1), out)


# Routers that choose among groups of experts, or by more than one score

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
class SqrtSoftplusRouter:
    """Score by the roots of softpluses, and choose with a bias, or by token ids (DeepSeek-V4)."""

    experts: Experts
    gate: Linear
    bias: Tensor | None = None  # [X], float32
    of_tokens: Tensor | None = None  # [V, K], int32

    def __call__(self, hidden: Tensor, token_ids: Tensor | None = None) -> ExpertChoice:
        """Choose experts for each row of the hidden states [T, E]."""
        opened = row_softplus(self.gate(hidden.float()))
        scores = opened.double().sqrt().float()  # [T, X]; torch's roots of float32 are not exact
        if self.of_tokens is not None and token_ids is not None:
            experts = self.of_tokens[token_ids].long()
        else:
            _, experts = best_experts(
                scores if self.bias is None else scores + self.bias, self.experts.top_k
            )
        weights = scores.gather(-1, experts)
        weights = weights / (_row_sum(weights) + 1e-20)
        return ExpertChoice(experts=experts, weights=weights * self.experts.output_scale)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """The experts of one layer, their router, and an optional shared expert for all rows.

    With `weighs_inputs` the weights multiply what goes into an expert, else what comes out.
    """

    router: Router
    experts: Sequence[TwoLayerMlp]
    shared: Mlp | None = None
    weighs_inputs: bool = False
    by_token: bool = False

    def __call__(self, hidden: Tensor, routed_by: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run hidden states [T, E] through their experts: [T, E], and the experts [T, K], int64.

        The router sees `routed_by` [T, E] where that is given; where it goes `by_token` that is the
        rows' token ids [T], which it sees beside them.
        """
        if self.by_token:
            routing = self.router(hidden, routed_by)
        else:
            routing = self.router(hidden if routed_by is None else routed_by)
        n_rows, top_k = routing.experts.shape
        expert_ids = routing.experts.flatten()  # [T x K]
        order = expert_ids.argsort(stable=True)  # by expert, then by row
        outputs = hidden.new_empty(n_rows * top_k, hidden.shape[-1])
        counts = expert_ids.bincount(minlength=len(self.experts)).tolist()
        visited = [expert for expert, n_routed in enumerate(counts) if n_routed]
        for expert in visited:
            _fetch(self.experts[expert])
        chosen_by = torch.split(order, [counts[expert] for expert in visited])

        def inner(expert: int, chosen: Tensor) -> Tensor:
            routed = hidden.index_select(0, chosen // top_k)
            if self.weighs_inputs:
                routed = routed * routing.weights.flatten()[chosen, None].to(routed.dtype)
            return self.experts[expert].inner(routed)

        downs = [self.experts[expert].down_proj for expert in visited]
        for chosen, made in zip(
            chosen_by, multiply_each(downs, map(inner, visited, chosen_by)), strict=True
        ):
            outputs.index_copy_(0, chosen, made)
        weights = torch.ones_like(routing.weights) if self.weighs_inputs else routing.weights
        total = _weighted_sum(outputs.view(n_rows, top_k, -1), weights)
        if self.shared is not None:
            total = total + self.shared(hidden)
        return total, routing.experts


def _fetch(mlp: Mlp) -> None:
    """Have an expert that is not in memory read while others compute."""
    last = getattr(mlp, "down_proj", None)  # its linears come together
    fetch = getattr(last, "fetch", None)  # of a StreamedLinear
    if fetch is not None:
        fetch()


def _weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum expert outputs [T, K, E] by their weights [T, K], in float32: [T, E] in their dtype.

    One by one: the order within a reduction over K could depend on T.
    """
    total = outputs.new_zeros(outputs.shape[0], outputs.shape[2], dtype=torch.float32)
    for place in range(outputs.shape[1]):
        total += outputs[:, place] * weights[:, place, None]
    return total.to(outputs.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMlp:
    """Gate and up, both clamped, the gate times its own sigmoid, up plus 1 (gpt-oss).

    The gate is at most `limit`, up within -`limit` and `limit`; `alpha` multiplies the gate within
    the sigmoid, and `added` is what is added to up.
    """

    limit: float
    gate_up_proj: Linear
    down_proj: Linear
    alpha: float = 1.0
    added: float = 0.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [T, E] from [T, E], each row for itself."""
        return self.down_proj(self.inner(hidden))

    def inner(self, hidden: Tensor) -> Tensor:
        """See TwoLayerMlp."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return row_sigmoid(gate * self.alpha).mul_(gate) * up.add_(self.added)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateClampedMlp:
    """A gated MLP by SiLU, which is at most `limit`, and up within -`limit` and `limit` (Step)."""

    limit: float
    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [T, E] from [T, E], each row for itself."""
        return self.down_proj(self.inner(hidden))

    def inner(self, hidden: Tensor) -> Tensor:
        """See TwoLayerMlp."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        made = activate(Activation.SILU, gate).clamp_(max=self.limit)
        return made.mul_(up.clamp(-self.limit, self.limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert whose output is weighted by the sigmoid of its own gate (Qwen2-MoE)."""

    expert: GatedMlp
    gate: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [T, E] from [T, E], each row for itself."""
        return self.expert(hidden).mul_(row_sigmoid(self.gate(hidden)))
