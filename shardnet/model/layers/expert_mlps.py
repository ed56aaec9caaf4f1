"""MLPs of experts that are not the usual gated MLP: gpt-oss's, and Qwen2-MoE's shared one.

Knows their arithmetic, not parameter names. Must not know routers or stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.modules import GatedMlp
from shardnet.model.layers.norms import row_sigmoid


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMlp:
    """Gate and up, both clamped, the gate times its own sigmoid, up plus 1 (gpt-oss).

    The gate is at most `limit`, up within -`limit` and `limit`; `alpha` multiplies the gate within
    the sigmoid.
    """

    limit: float
    alpha: float
    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [T, E] from [T, E], each row for itself."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return self.down_proj(row_sigmoid(gate * self.alpha).mul_(gate) * up.add_(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert whose output is weighted by the sigmoid of its own gate (Qwen2-MoE)."""

    expert: GatedMlp
    gate: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [T, E] from [T, E], each row for itself."""
        return self.expert(hidden).mul_(row_sigmoid(self.gate(hidden)))
