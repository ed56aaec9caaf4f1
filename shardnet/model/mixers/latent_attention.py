"""Attention over latents that all heads share (arXiv 2405.04434).

Knows DeepSeek's parameter names, which are transformers'. Must not know files, wire or scheduling.

transformers computes keys and values of every head from the latents of all positions. Here these
matmuls are applied to the query and to the attended latent instead: the same numbers, and a step
reads one latent per position, whatever the number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import HeadMatmuls
from shardnet.model.config.model_config import Latent, ModelConfig, Temperature
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import Norm, row_sigmoid
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.mixers.mixed_attention import tempered
from shardnet.model.mixers.position_indexer import PositionIndexer
from shardnet.model.shards.cut import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, full or of low rank, over latents that all heads share.

    With a `gate_proj` what a head gives is multiplied by the sigmoid of its gate (Ling 3), or of
    those of its columns; with an `indexer` rows attend to the positions that it chooses.
    Axes: N columns of a head's own keys, R of the rotated part, L of a latent, V of a value.
    """

    latent: Latent
    kind: AttentionKind
    queries: LatentQueries
    kv_a_proj: Linear
    kv_a_layernorm: Norm
    keys: HeadMatmuls  # [H, N, L]
    values: HeadMatmuls  # [H, L, V]
    o_proj: Linear
    temperature: Temperature | None = None
    gate_proj: Linear | None = None
    indexer: PositionIndexer | None = None

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> LatentAttention:
        """Take the parameters of the absolute `layer`."""
        latent, attn = config.latent, f"model.layers.{layer}.self_attn"
        assert latent is not None
        of_heads = weights.matrix(f"{attn}.kv_b_proj", rows=Axis.HEADS)
        of_heads = of_heads.view(config.n_heads, -1, latent.rank)
        indexer = None if config.indexer is None else PositionIndexer(config, weights, layer)
        return cls(
            latent=latent,
            kind=replace(AttentionKind.of(config, layer), has_index=indexer is not None),
            queries=LatentQueries.load(latent, weights, attn),
            kv_a_proj=weights.linear(f"{attn}.kv_a_proj_with_mqa"),
            kv_a_layernorm=weights.norm(f"{attn}.kv_a_layernorm", latent.norm_eps),
            keys=HeadMatmuls.of(of_heads[:, : latent.nope_size]),
            values=HeadMatmuls.of(of_heads[:, latent.nope_size :].transpose(1, 2)),
            o_proj=weights.linear(f"{attn}.o_proj", inputs=Axis.HEADS),
            temperature=config.temperature,
            indexer=indexer,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, E] in and out."""
        n_rows, latent = hidden.shape[0], self.latent
        low_rank = self.queries.low_rank(hidden)
        queries = self.queries.of_heads(low_rank)
        queries = queries.view(n_rows, -1, latent.nope_size + latent.rope_size)
        if self.temperature is not None:
            queries = tempered(queries, self.temperature, step.positions)
        cached = self.kv_a_proj(hidden)  # [T, L + R]
        turning = torch.cat(
            (queries[..., latent.nope_size :], cached[:, None, latent.rank :]), 1
        )  # [T, H + 1, R]
        turned = turning
        if latent.rope_size:
            turned = rotary.rotate_pairs(turning) if latent.interleaved else rotary.rotate(turning)
        own = _by_head(queries[..., : latent.nope_size], self.keys, step)  # [T, H, L]
        beside, choose = hidden.new_empty(n_rows, 1, 0), None
        if self.indexer is not None:
            beside, choose = self.indexer(hidden, low_rank, rotary)
        attended = attention(
            torch.cat((own, turned[:, :-1]), -1),
            torch.cat((self.kv_a_layernorm(cached[:, : latent.rank]), turned[:, -1]), -1)[:, None],
            beside,
            index,
            step,
            self.kind,
            choose,
        )
        latents = attended.view(n_rows, -1, latent.width)[..., : latent.rank]  # [T, H, L]
        values = _by_head(latents, self.values, step)  # [T, H, V]
        if self.gate_proj is not None:
            values = values * row_sigmoid(self.gate_proj(hidden)).view(*values.shape[:2], -1)
        return self.o_proj(values.flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries:
    """The queries of all heads: of low rank, or full where `q_a_layernorm` is None."""

    first: Linear
    q_a_layernorm: Norm | None
    q_b_proj: Linear | None

    @classmethod
    def load(cls, latent: Latent, weights: WeightSource, attn: str) -> LatentQueries:
        """Take the parameters of one layer's `attn`."""
        if latent.query_rank is None:
            whole = weights.linear(f"{attn}.q_proj", outputs=(Axis.HEADS,))
            return cls(first=whole, q_a_layernorm=None, q_b_proj=None)
        return cls(
            first=weights.linear(f"{attn}.q_a_proj"),
            q_a_layernorm=weights.norm(f"{attn}.q_a_layernorm", latent.norm_eps),
            q_b_proj=weights.linear(f"{attn}.q_b_proj", outputs=(Axis.HEADS,)),
        )

    def low_rank(self, hidden: Tensor) -> Tensor:
        """Project hidden states [T, E] to what the queries of all heads come of."""
        rows = self.first(hidden)
        return rows if self.q_a_layernorm is None else self.q_a_layernorm(rows)

    def of_heads(self, low_rank: Tensor) -> Tensor:
        """Make the queries of all heads: [T, H x (N + R)]."""
        return low_rank if self.q_b_proj is None else self.q_b_proj(low_rank)


def _by_head(rows: Tensor, weights: HeadMatmuls, step: ForwardStep) -> Tensor:
    """Multiply each head of [T, H, A] by its own [A, B]: [T, H, B].

    As in attention, torch computes rows outside prompt chunks one by one, so that their bits do not
    depend on the batch.
    """
    if weights.is_native:
        return weights(rows)
    parts = []
    for span in step.spans:
        pieces = [rows[span.start : span.end]]
        if span.masks is None:
            pieces = [rows[row : row + 1] for row in range(span.start, span.end)]
        parts += [weights(piece) for piece in pieces]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
