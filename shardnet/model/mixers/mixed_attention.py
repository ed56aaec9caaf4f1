"""Attention that differs: queries that grow with their position, and outputs that gates multiply.

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
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.modules import Heads, SelfAttention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, row_sigmoid, row_softplus
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.mixers.position_indexer import BlockIndexer
from shardnet.model.shards.cut import HEADS_EACH, Axis


class MixedAttention:
    """Attention of one layer, either `is_rotated` or of queries that grow with their position."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`, under Llama's names."""
        self.inner = SelfAttention.load(config, weights, layer)
        self.temperature = config.temperature
        self.is_rotated = layer not in config.nope_layers
        self.has_unit_heads = config.has_unit_heads
        self.eps = config.norm_eps

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

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        heads = self.inner.heads(hidden, rotary)
        queries = tempered(heads.queries, self.temperature, step.positions)
        return self.inner.o_proj(self.inner.attend(replace(heads, queries=queries), index, step))


def tempered(queries: Tensor, temperature: Temperature, positions: Tensor) -> Tensor:
    """Multiply queries [T, H, D] at `positions`, int64 [T], by how much they grow: same shape."""
    growth = growth_at(temperature, positions).to(positions.device)
    return (queries * growth[:, None, None]).to(queries.dtype)


def growth_at(temperature: Temperature, positions: Tensor) -> Tensor:
    """Return by how much queries at `positions`, int64 [T], grow: float32 [T]."""
    exact = where_float64(positions).double()
    steps = torch.floor((exact + temperature.shift) / temperature.floor)
    return (natural_logarithm(steps + 1) * temperature.scale + 1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttention:
    """Attention with a norm over each head of queries and keys, and a gate for each head's output.

    `qkvg_proj` gives for each head its query and its gate, then all keys, then all values; with
    `gates_behind` the gates last. A head's gate has `gate_columns`: its size, or 1. Outputs are
    multiplied by the sigmoids of gates, with `gates_soft` by their softpluses. With an `indexer`
    rows attend to the positions that it chooses.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    kind: AttentionKind
    qkvg_proj: Linear
    qk_norm: HeadNorm
    o_proj: Linear
    gate_columns: int
    gates_behind: bool = False
    gates_soft: bool = False
    indexer: BlockIndexer | None = None

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        gate_columns: int | None = None,
        gate: str = "gate_proj",
    ) -> GatedAttention:
        """Take the parameters of the absolute `layer`.

        With `gate_columns` gates have a linear of their own, of so many outputs a head, called
        `gate`.
        """
        attn, own = f"model.layers.{layer}.self_attn", gate_columns is not None
        kind, indexer = AttentionKind.of(config, layer), None
        if config.indexer is not None:
            kind = replace(kind, value_size=config.head_size)
            indexer = BlockIndexer(config, weights, layer)
        names = [f"{attn}.{name}" for name in ("q_proj", "k_proj", "v_proj", *[gate] * own)]
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_size=config.head_size,
            kind=kind,
            qkvg_proj=weights.linear(*names, outputs=(*HEADS_EACH, *[Axis.HEADS] * own)),
            qk_norm=HeadNorm.join(
                weights.norm(f"{attn}.q_norm", config.norm_eps, config.norm_offset),
                weights.norm(f"{attn}.k_norm", config.norm_eps, config.norm_offset),
                config.n_heads,
                config.n_kv_heads,
            ),
            o_proj=weights.linear(f"{attn}.o_proj", inputs=Axis.HEADS),
            gate_columns=gate_columns or config.head_size,
            gates_behind=own,
            indexer=indexer,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        n_rows, n_heads, size = hidden.shape[0], self.n_heads, self.head_size
        projected, gates = self.qkvg_proj(hidden), None
        if self.gates_behind:
            n_looking = (n_heads + 2 * self.n_kv_heads) * size
            projected, gates = projected.tensor_split([n_looking], 1)
        heads = projected.reshape(n_rows, -1, size)  # [T, H or 2 H + 2 KV heads, D]
        queries = heads[:, : -2 * self.n_kv_heads]
        keys, values = heads[:, -2 * self.n_kv_heads :].chunk(2, 1)  # [T, KV heads, D] each
        if gates is None:
            pairs = queries.view(n_rows, n_heads, 2, size)
            queries, gates = pairs[:, :, 0], pairs[:, :, 1].flatten(1)
        rotated = rotary.rotate(self.qk_norm(torch.cat((queries, keys), 1)))
        choose = None
        if self.indexer is not None:
            beside, choose = self.indexer(hidden, rotary, step.rotary_positions)
            values = torch.cat((values, beside), -1)
        queries, keys = rotated[:, :n_heads], rotated[:, n_heads:]
        attended = attention(queries, keys, values, index, step, self.kind, choose)
        open_rows = row_softplus if self.gates_soft else row_sigmoid
        factors = open_rows(gates.contiguous()).view(n_rows, n_heads, -1)
        return self.o_proj((attended.view(n_rows, n_heads, size) * factors).flatten(1))
