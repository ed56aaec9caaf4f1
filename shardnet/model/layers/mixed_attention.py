"""Attention whose queries grow with their position: in all layers, or as Llama 4 has it.

Knows the rotation, norms and scales that come before attending. Must not know how a family names
its other parameters, files, wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.arithmetic.elementary import natural_logarithm
from shardnet.model.arithmetic.row_functions import normed_rows
from shardnet.model.config.model_config import ModelConfig, Temperature
from shardnet.model.kernels.devices import where_float64
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.modules import Heads, SelfAttention
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAttention:
    """Attention of one layer, either `is_rotated` or of queries that grow with their position."""

    inner: SelfAttention
    temperature: Temperature | None
    is_rotated: bool
    has_unit_heads: bool
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> MixedAttention:
        """Take the parameters of the absolute `layer`, under Llama's names."""
        return cls(
            inner=SelfAttention.load(config, weights, layer),
            temperature=config.temperature,
            is_rotated=layer not in config.nope_layers,
            has_unit_heads=config.has_unit_heads,
            eps=config.norm_eps,
        )

    @property
    def fusible(self) -> None:
        """None: what comes before attending is not what other families have."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        inner, n_rotated = self.inner, self.inner.n_heads + self.inner.n_kv_heads
        heads = inner.qkv_proj(hidden).view(hidden.shape[0], -1, inner.head_size)
        queries_keys = heads[:, :n_rotated]
        if self.is_rotated:
            queries_keys = self._rotate(queries_keys, rotary)
        queries = queries_keys[:, : inner.n_heads]
        if not self.is_rotated and self.temperature is not None:
            queries = tempered(queries, self.temperature, step.positions)
        split = Heads(
            queries=queries, keys=queries_keys[:, inner.n_heads :], values=heads[:, n_rotated:]
        )
        return inner.o_proj(inner.attend(split, index, step))

    def _rotate(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """Rotate queries and keys [T, H + KV heads, D], the halves of pairs apart afterwards."""
        turned = rotary.rotate_pairs(heads)
        if not self.has_unit_heads:
            return turned
        native = normed_rows(turned.reshape(-1, turned.shape[-1]), None, self.eps)
        if native is not None:
            return native.view(turned.shape)
        return F.rms_norm(turned.float(), turned.shape[-1:], None, self.eps).to(turned.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperedAttention:
    """Self-attention whose rotated queries grow with their position (Ministral 3)."""

    inner: SelfAttention
    temperature: Temperature

    @property
    def fusible(self) -> None:
        """None: queries change between the rotation and attending."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        heads = self.inner.heads(hidden, rotary)
        queries = tempered(heads.queries, self.temperature, step.positions)
        return self.inner.o_proj(self.inner.attend(replace(heads, queries=queries), index, step))


def tempered(queries: Tensor, temperature: Temperature, positions: Tensor) -> Tensor:
    """Multiply queries [T, H, D] at `positions`, int64 [T], by their factors: same shape."""
    exact = where_float64(positions).double()
    steps = torch.floor((exact + temperature.shift) / temperature.floor)
    factors = natural_logarithm(steps + 1) * temperature.scale + 1
    return (queries * factors.float().to(positions.device)[:, None, None]).to(queries.dtype)
