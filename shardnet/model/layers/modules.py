"""The two halves of a decoder layer as most families have them: self-attention and a gated MLP.

Knows which products make them, not how a family names its parameters. Must not know wire or
scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import AttentionKind, Step, attention
from shardnet.model.layers.norms import HeadNorm, activate
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource

QkNorm = Callable[[Tensor], Tensor]
"""Normalizes queries and keys, which stand side by side: [T, H + KV heads, D] in and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What the rows of a micro-batch bring to attention, rotated by their positions."""

    queries: Tensor  # [T, H, D]
    keys: Tensor  # [T, KV heads, D]
    values: Tensor  # [T, KV heads, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Queries, keys and values in one product, rotary positions, attention, output product.

    `qk_norm`, where there is one, comes before the rotation.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    kind: AttentionKind
    qkv_proj: Linear
    o_proj: Linear
    qk_norm: QkNorm | None = None

    @classmethod
    def load(
        cls, config: ModelConfig, weights: WeightSource, layer: int, *, with_head_norm: bool = False
    ) -> SelfAttention:
        """Take the parameters under Llama's names, and Qwen3's for the norms."""
        attn = f"model.layers.{layer}.self_attn"
        qkv_proj = weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
        qk_norm = None
        if with_head_norm:
            qk_norm = HeadNorm.join(
                weights.norm(f"{attn}.q_norm", config.norm_eps, config.norm_offset),
                weights.norm(f"{attn}.k_norm", config.norm_eps, config.norm_offset),
                config.n_heads,
                config.n_kv_heads,
            )
        return cls.of(config, layer, qkv_proj, weights.linear(f"{attn}.o_proj"), qk_norm)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layer: int,
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: QkNorm | None = None,
    ) -> SelfAttention:
        """Put products together as the config says of the absolute `layer`."""
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_size=config.head_size,
            kind=AttentionKind.of(config, layer),
            qkv_proj=qkv_proj,
            o_proj=o_proj,
            qk_norm=qk_norm,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, E] in and out."""
        return self.o_proj(self.attend(self.heads(hidden, rotary), index, step))

    def heads(self, hidden: Tensor, rotary: Rotary) -> Heads:
        """Make of rows [T, E] what looks, what is looked at and what is found there."""
        n_rotated = self.n_heads + self.n_kv_heads
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_size)  # [T, Q+K+V, D]
        looking = heads[:, :n_rotated]
        if self.qk_norm is not None:
            looking = self.qk_norm(looking)
        rotated = rotary.rotate(looking)
        return Heads(
            queries=rotated[:, : self.n_heads],
            keys=rotated[:, self.n_heads :],
            values=heads[:, n_rotated:],
        )

    def attend(self, heads: Heads, index: int, step: Step) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, H x D], before the output product."""
        return attention(heads.queries, heads.keys, heads.values, index, step, self.kind)


class Attention(Protocol):
    """The first half of a layer."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, E] in and out."""


class Mlp(Protocol):
    """The second half of a layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run every row: [T, E] in and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """Gate and up in one product, down in another."""

    activation: Activation
    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, prefix: str) -> GatedMlp:
        """Take the parameters under Llama's names."""
        return cls(
            activation=config.activation,
            gate_up_proj=weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            down_proj=weights.linear(f"{prefix}.down_proj"),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run every row: [T, E] in and out."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        return self.down_proj(activate(self.activation, gate).mul_(up))
