"""Attention of layers with rotary positions among layers without any, as Llama 4 has it.

Knows the rotation, norms and scales that come before attending. Must not know how a family names
its other parameters, files, wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.arithmetic.elementary import natural_logarithm
from shardnet.model.arithmetic.row_functions import normed_rows
from shardnet.model.config.model_config import MixedPositions, ModelConfig
from shardnet.model.kernels.devices import where_float64
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.modules import Heads, SelfAttention
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAttention:
    """Attention of one layer, either `is_rotated` or of queries that grow with their position."""

    inner: SelfAttention
    positions: MixedPositions
    is_rotated: bool
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> MixedAttention:
        """Take the parameters of the absolute `layer`, under Llama's names."""
        assert config.mixed is not None
        return cls(
            inner=SelfAttention.load(config, weights, layer),
            positions=config.mixed,
            is_rotated=layer not in config.mixed.nope_layers,
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
        if not self.is_rotated and self.positions.temperature:
            queries = (queries * self._temperatures(step.positions)).to(queries.dtype)
        split = Heads(
            queries=queries, keys=queries_keys[:, inner.n_heads :], values=heads[:, n_rotated:]
        )
        return inner.o_proj(inner.attend(split, index, step))

    def _rotate(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """Rotate queries and keys [T, H + KV heads, D], the halves of pairs apart afterwards."""
        pairs = heads.view(*heads.shape[:-1], -1, 2)  # [T, H + KV heads, D / 2, 2]
        turned = rotary.rotate(pairs.transpose(-1, -2).flatten(-2))
        if not self.positions.unit_heads:
            return turned
        native = normed_rows(turned.reshape(-1, turned.shape[-1]), None, self.eps)
        if native is not None:
            return native.view(turned.shape)
        return F.rms_norm(turned.float(), turned.shape[-1:], None, self.eps).to(turned.dtype)

    def _temperatures(self, positions: Tensor) -> Tensor:
        """Factors of the queries at `positions`, int64 [T]: float32 [T, 1, 1]."""
        exact = where_float64(positions).double()
        steps = torch.floor((exact + 1) / self.positions.temperature_floor)
        factors = natural_logarithm(steps + 1) * self.positions.temperature + 1
        return factors.float().to(positions.device)[:, None, None]
