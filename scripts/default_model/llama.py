"""The model: the arithmetic and the parameter names of transformers' `LlamaForCausalLM`.

This module knows one forward pass. It must not know the text, the optimizer or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model."""

    vocab: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned gain (arXiv:1910.07467)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, T, E] normalized."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rope_tables(shape: Shape, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, D] for positions 0..T-1; both halves of D hold the same angles."""
    exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = torch.outer(torch.arange(n_tokens), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, H, T, D] by its positions, pairing dimension i with i + D/2 (arXiv:2104.09864)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which groups of query heads share one key-value head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.heads // shape.kv_heads
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what every token of x [B, T, E] gathers from itself and those before it."""
        # each [B, H, T, D]; key and value have fewer heads, repeated below
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (t.repeat_interleave(self.group, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """A SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of x [B, T, E]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after this layer, x [B, T, E] before it."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Decoder(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape)


class Llama(nn.Module):
    """A Llama decoder whose output matrix is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(shape, dropout)
        cos, sin = rope_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.layers) ** -0.5 if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, vocab] for ids [B, T]."""
        n_tokens = ids.shape[1]
        x: Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, self.cos[:n_tokens], self.sin[:n_tokens])
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
