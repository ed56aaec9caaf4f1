"""The optimizer of the layers' matrices: Muon.

This module knows gradients and steps. It must not know the model or the schedule.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return matrices [N, R, C] with singular values pushed near one, directions kept.

    The quintic iteration and its constants are those of Muon (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide: Tensor = matrices.bfloat16()
    tall = wide.shape[1] > wide.shape[2]
    if tall:
        wide = wide.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if tall else wide


class Muon(torch.optim.Optimizer):
    """Momentum whose step for a matrix is the nearest orthogonal one; decoupled weight decay."""

    def __init__(self, params: ParamsT, *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient, all matrices of one shape in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                steps = orthogonalize(torch.stack([self._momentum(p, group) for p in parameters]))
                size = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, step in zip(parameters, steps.float(), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(step, alpha=size)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, float]) -> Tensor:
        """Fold the gradient into the running mean and return Nesterov's look-ahead of it."""
        assert parameter.grad is not None
        mean: Tensor = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        mean.lerp_(parameter.grad, 1 - group["momentum"])
        return torch.lerp(parameter.grad, mean, group["momentum"])
