"""A decoder layer whose rows draft on, each behind its own drafts. Plain torch, for training.

A row knows the text as far as its own place. `Keys` holds the text's keys and values, and behind
them, step by step, those of each row's own drafts, which no other row sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass
class Keys:
    """Keys and values [B, H, T, D] of the text, then of each row's drafts."""

    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def branch(self) -> Keys:
        """Return a copy that other drafts can go behind."""
        return Keys([*self.steps])


class Attention(nn.Module):
    """Grouped-query attention over the text and a row's own drafts."""

    def __init__(self, config: LlamaConfig, width: int, *, head_norms: bool = False) -> None:
        super().__init__()
        self.n_heads, self.size = config.num_attention_heads, config.head_dim
        n_kv = config.num_key_value_heads
        self.q_proj = nn.Linear(width, self.n_heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, n_kv * self.size, bias=False)
        self.v_proj = nn.Linear(width, n_kv * self.size, bias=False)
        self.o_proj = nn.Linear(self.n_heads * self.size, config.hidden_size, bias=False)
        if head_norms:
            self.q_norm = LlamaRMSNorm(self.size, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.size, config.rms_norm_eps)
        self.head_norms = head_norms
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, rows: Tensor, keys: Keys) -> Tensor:
        """Give [B, T, E] for rows [B, T, W], which are the text's or the next draft of each row."""
        places = torch.arange(rows.shape[1]) + len(keys.steps)
        queries = self.queries(rows, places)
        keys.steps.append(self.keys(rows, places))
        text_keys, text_values = keys.steps[0]
        unknown = torch.full((rows.shape[1],) * 2, -torch.inf).triu(1)
        scores = [queries @ text_keys.mT + unknown]
        scores += [(queries * own).sum(-1, keepdim=True) for own, _ in keys.steps[1:]]
        shares = torch.cat(scores, -1).mul(self.size**-0.5).softmax(-1)
        n_rows = rows.shape[1]
        found = shares[..., :n_rows] @ text_values
        for step, (_, own) in enumerate(keys.steps[1:]):
            found = found + shares[..., n_rows + step, None] * own
        return self.joined(found)

    def queries(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return queries [B, H, T, D] of rows [B, T, W] at places [T]."""
        heads = self.q_proj(rows).unflatten(-1, (-1, self.size)).transpose(1, 2)
        return self._turned(self.q_norm(heads) if self.head_norms else heads, places)

    def keys(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] of rows [B, T, W] at places [T]."""
        keys, values = (
            projection(rows).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        keys = self._turned(self.k_norm(keys) if self.head_norms else keys, places)
        times = self.n_heads // keys.shape[1]
        return keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)

    def joined(self, found: Tensor) -> Tensor:
        """Return [B, T, E] from [B, H, T, D]."""
        joined: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return joined

    def _turned(self, heads: Tensor, places: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, places[None])
        left, right = heads.chunk(2, -1)
        turned: Tensor = heads * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
        return turned


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, width: int = 0, *, head_norms: bool = False) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.self_attn = Attention(config, width or config.hidden_size, head_norms=head_norms)
        self.mlp: nn.Module = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps)

    def forward(self, hidden: Tensor, keys: Keys) -> Tensor:
        """Give [B, T, E] from [B, T, E]."""
        return self.finish(hidden + self.self_attn(self.input_layernorm(hidden), keys))

    def finish(self, hidden: Tensor) -> Tensor:
        """Add the MLP."""
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added
