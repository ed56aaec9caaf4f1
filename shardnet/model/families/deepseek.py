"""DeepSeek-V2's and V3's layers: attention over latents, experts in groups, shared ones.

Knows the forward passes of DeepseekV2ForCausalLM and DeepseekV3ForCausalLM (transformers,
modeling_deepseek_v2.py and modeling_deepseek_v3.py), with Hugging Face's parameter names. Must not
know files, wire or scheduling.

transformers makes keys and values of every head from the latents of all positions. Here the
products that do so are applied to the query and to what was attended instead: the same numbers, and
a step reads one latent of each position, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import Experts, Latent, ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.families.qwen3_moe import load_experts
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import AttentionKind, ForwardStep, attention
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.experts import Router, Routing, SparseMlp, best_experts, best_groups
from shardnet.model.layers.modules import GatedMlp
from shardnet.model.layers.norms import Norm, row_sigmoid
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource

LATENT_EPS = 1e-6
"""Of the norms over latents, whatever the config says of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, straight or by a detour over few columns, over latents that all heads share.

    Axes: N columns of a head's own keys, R of the rotated part, L of a latent, V of a value.
    """

    latent: Latent
    kind: AttentionKind
    queries: LatentQueries
    kv_a_proj: Linear
    kv_a_layernorm: Norm
    keys: Tensor  # [H, N, L]
    values: Tensor  # [H, L, V]
    o_proj: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> LatentAttention:
        """Take the parameters of the absolute `layer`."""
        latent, attn = config.latent, f"model.layers.{layer}.self_attn"
        assert latent is not None
        of_heads = weights.table(f"{attn}.kv_b_proj").view(config.n_heads, -1, latent.rank)
        return cls(
            latent=latent,
            kind=AttentionKind.of(config, layer),
            queries=LatentQueries.load(latent, weights, attn),
            kv_a_proj=weights.linear(f"{attn}.kv_a_proj_with_mqa"),
            kv_a_layernorm=weights.norm(f"{attn}.kv_a_layernorm", LATENT_EPS),
            keys=of_heads[:, : latent.nope_size],
            values=of_heads[:, latent.nope_size :].transpose(1, 2),
            o_proj=weights.linear(f"{attn}.o_proj"),
        )

    @property
    def fusible(self) -> None:
        """None: it has linear layers inside attention."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, E] in and out."""
        n_rows, latent = hidden.shape[0], self.latent
        queries = self.queries(hidden).view(n_rows, -1, latent.nope_size + latent.rope_size)
        cached = self.kv_a_proj(hidden)  # [T, L + R]
        turning = torch.cat(
            (queries[..., latent.nope_size :], cached[:, None, latent.rank :]), 1
        )  # [T, H + 1, R]
        if latent.interleaved:
            pairs = turning.view(*turning.shape[:-1], -1, 2)  # [T, H + 1, R / 2, 2]
            turning = pairs.transpose(-1, -2).flatten(-2)
        turned = rotary.rotate(turning)
        own = _by_head(queries[..., : latent.nope_size], self.keys, step)  # [T, H, L]
        attended = attention(
            torch.cat((own, turned[:, :-1]), -1),
            torch.cat((self.kv_a_layernorm(cached[:, : latent.rank]), turned[:, -1]), -1)[:, None],
            hidden.new_empty(n_rows, 1, 0),
            index,
            step,
            self.kind,
        )
        latents = attended.view(n_rows, -1, latent.width)[..., : latent.rank]  # [T, H, L]
        return self.o_proj(_by_head(latents, self.values, step).flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries:
    """The queries of all heads, straight where `q_a_layernorm` is None."""

    first: Linear
    q_a_layernorm: Norm | None
    q_b_proj: Linear | None

    @classmethod
    def load(cls, latent: Latent, weights: WeightSource, attn: str) -> LatentQueries:
        """Take the parameters of one layer's `attn`."""
        if latent.query_rank is None:
            return cls(first=weights.linear(f"{attn}.q_proj"), q_a_layernorm=None, q_b_proj=None)
        return cls(
            first=weights.linear(f"{attn}.q_a_proj"),
            q_a_layernorm=weights.norm(f"{attn}.q_a_layernorm", LATENT_EPS),
            q_b_proj=weights.linear(f"{attn}.q_b_proj"),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Make queries of [T, E]: [T, H x (N + R)]."""
        queries = self.first(hidden)
        if self.q_a_layernorm is None or self.q_b_proj is None:
            return queries
        return self.q_b_proj(self.q_a_layernorm(queries))


def _by_head(rows: Tensor, weights: Tensor, step: ForwardStep) -> Tensor:
    """Multiply the heads of [T, H, A] by the [A, B] of each in [H, A, B]: [T, H, B].

    As in attention, rows that are no prompt chunk are computed one by one, so that their bits do
    not depend on each other.
    """
    parts = []
    for span in step.spans:
        pieces = [rows[span.start : span.end]]
        if span.masks is None:
            pieces = [rows[row : row + 1] for row in range(span.start, span.end)]
        parts += [torch.bmm(piece.transpose(0, 1), weights).transpose(0, 1) for piece in pieces]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxGroupRouter:
    """V2's: by softmax, among the groups with the best expert each."""

    experts: Experts
    gate: Linear

    def __call__(self, hidden: Tensor) -> Routing:
        """Choose for every row."""
        config = self.experts
        scores = self.gate(hidden.float()).softmax(-1)  # [T, X]
        group_scores = scores.view(len(scores), config.n_groups, -1).amax(-1)
        left = best_groups(scores, group_scores, config.top_groups, 0.0)
        weights, experts = best_experts(left, config.top_k)
        return Routing(experts=experts, weights=weights * config.answer_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidGroupRouter:
    """V3's: by sigmoid and a bias for the choice alone, among groups whose two best are best."""

    experts: Experts
    gate: Linear
    bias: Tensor  # [X], float32

    def __call__(self, hidden: Tensor) -> Routing:
        """Choose for every row."""
        config = self.experts
        scores = row_sigmoid(self.gate(hidden.float()))  # [T, X]
        biased = (scores + self.bias).contiguous()
        best_two = biased.view(len(biased), config.n_groups, -1).topk(2, -1).values
        left = best_groups(biased, best_two.sum(-1), config.top_groups, -torch.inf)
        _, experts = best_experts(left, config.top_k)
        weights = scores.gather(-1, experts)
        if config.normalize_top_k:
            weights = weights / (_row_sum(weights) + 1e-20)
        return Routing(experts=experts, weights=weights * config.answer_scale)


def _row_sum(weights: Tensor) -> Tensor:
    """Add [T, K] up to [T, 1] in one order, however many rows there are."""
    total = weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + weights[:, place : place + 1]
    return total


def load_deepseek_v2_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""

    def router(experts: Experts, gate: str) -> Router:
        return SoftmaxGroupRouter(experts=experts, gate=weights.linear(gate, wide=True))

    return _load_layer(config, weights, layer, router)


def load_deepseek_v3_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""

    def router(experts: Experts, gate: str) -> Router:
        return SigmoidGroupRouter(
            experts=experts,
            gate=weights.linear(gate, wide=True),
            bias=weights.parameter(f"{gate}.e_score_correction_bias"),
        )

    return _load_layer(config, weights, layer, router)


def _load_layer(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    make_router: Callable[[Experts, str], Router],
) -> Layer:
    mlp, experts = f"model.layers.{layer}.mlp", config.layer_experts(layer)
    self_attn = LatentAttention.load(config, weights, layer)
    if experts is None:
        dense = GatedMlp.load(config, weights, mlp)
        return llama_layer(config, weights, layer, self_attn, dense)
    sparse = SparseMlp(
        router=make_router(experts, f"{mlp}.gate"),
        experts=load_experts(config, weights, f"{mlp}.experts", experts.n_experts),
        shared=GatedMlp.load(config, weights, f"{mlp}.shared_experts"),
    )
    return llama_layer(config, weights, layer, self_attn, sparse)
