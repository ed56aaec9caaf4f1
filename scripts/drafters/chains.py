"""Drafters that draft one token after the other: EAGLE-3, a layer for MTP, a small model.

A row knows the model's states as far as its own place, and the token behind it. A step takes what
the step before gave, and the newest tokens' embeddings; it gives what the next step takes, and the
rows that say tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, LlamaConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .layer import Keys, Layer

EAGLE_LAYERS = (2, 4, 5)
"""The states that an EAGLE-3 head reads: after so many of 8 layers, as its authors choose them."""
N_EXPERTS, TOP_K, N_SHARED = 4, 2, 4


class Chain(nn.Module):
    """What drafts step by step. The keys of its layers are `n_layers` lists."""

    n_layers = 1
    n_before = 0
    """Tokens before the text that a row's first step follows."""
    vocabulary: Tensor | None = None
    """The tokens that it can say, if not all."""

    def read(self, states: dict[int, Tensor]) -> Tensor:
        """Give what the first step takes, [B, T, E], from states after so many layers."""
        raise NotImplementedError

    def step(self, known: Tensor, embedded: Tensor, keys: list[Keys]) -> tuple[Tensor, Tensor]:
        """Give what the next step takes and rows to score, each [B, T, E]."""
        raise NotImplementedError

    def score(self, rows: Tensor, table: Tensor) -> Tensor:
        """Give logits over the vocabulary."""
        return rows @ table.T


class EagleLayer(Layer):
    """Its attention reads the newest token's embedding beside what is known."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def both(self, known: Tensor, embedded: Tensor, keys: Keys) -> Tensor:
        """Give [B, T, E]."""
        rows = torch.cat((self.input_layernorm(embedded), self.hidden_norm(known)), -1)
        return self.finish(known + self.self_attn(rows, keys))


class Eagle(Chain):
    """An EAGLE-3 head (Li et al., 2025): states of three layers, one layer, words of its own."""

    def __init__(self, model: Any, vocabulary: Tensor) -> None:
        super().__init__()
        width = model.config.hidden_size
        self.vocabulary = vocabulary
        self.midlayer = EagleLayer(model.config)
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = LlamaRMSNorm(width, model.config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(vocabulary), bias=False)
        with torch.no_grad():  # begin with the last layer, the last state read and no embedding
            last = model.model.layers[-1]
            begin_like(self.midlayer, last, but=("self_attn",))
            self.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
            for name in ("q_proj", "k_proj", "v_proj"):
                ours, theirs = getattr(self.midlayer.self_attn, name), getattr(last.self_attn, name)
                ours.weight[:, width:] = theirs.weight
                ours.weight[:, :width] *= 0.1
            self.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            self.fc.weight.mul_(0.1)[:, 2 * width :] += torch.eye(width)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.model.embed_tokens.weight[vocabulary])

    def read(self, states: dict[int, Tensor]) -> Tensor:
        """See Chain."""
        read: Tensor = self.fc(torch.cat([states[layer] for layer in EAGLE_LAYERS], -1))
        return read

    def step(self, known: Tensor, embedded: Tensor, keys: list[Keys]) -> tuple[Tensor, Tensor]:
        """See Chain."""
        known = self.midlayer.both(known, embedded, keys[0])
        return known, self.norm(known)

    def score(self, rows: Tensor, table: Tensor) -> Tensor:
        """See Chain."""
        scores: Tensor = self.lm_head(rows)
        return scores


class Mtp(Chain):
    """A layer as GLM-4.5 has it behind its last: norms of state and embedding, joined."""

    def __init__(self, model: Any, config: Glm4MoeConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.norm = LlamaRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = Layer(model.config)
        last = model.model.layers[-1]
        begin_like(self.block, last, but=("mlp",))
        experts: Any = glm.Glm4MoeMoE(config)
        self.block.mlp = experts
        with torch.no_grad():
            begin_like(experts.shared_experts, last.mlp)
            for parameter in (*experts.experts.parameters(), experts.gate.weight):
                nn.init.normal_(parameter, std=0.02)
            self.norm.weight.copy_(model.model.norm.weight)
        self.n_states = model.config.num_hidden_layers

    def read(self, states: dict[int, Tensor]) -> Tensor:
        """See Chain."""
        return states[self.n_states]

    def step(self, known: Tensor, embedded: Tensor, keys: list[Keys]) -> tuple[Tensor, Tensor]:
        """See Chain."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(known)), -1))
        said: Tensor = self.norm(self.block(joined, keys[0]))
        return said, said


class Small(Chain):
    """A model of few layers and the same embeddings, which reads tokens alone."""

    n_layers = 2
    n_before = 1

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model.config) for _ in range(self.n_layers))
        self.norm = LlamaRMSNorm(model.config.hidden_size, model.config.rms_norm_eps)
        theirs = model.model.layers
        for ours, like in zip(self.layers, (theirs[0], theirs[-1]), strict=True):
            begin_like(ours, like)
        begin_like(self.norm, model.model.norm)

    def read(self, states: dict[int, Tensor]) -> Tensor:
        """See Chain."""
        return next(iter(states.values()))

    def step(self, known: Tensor, embedded: Tensor, keys: list[Keys]) -> tuple[Tensor, Tensor]:
        """See Chain."""
        for layer, held in zip(self.layers, keys, strict=True):
            embedded = layer(embedded, held)
        return embedded, self.norm(embedded)


def begin_like(ours: nn.Module, theirs: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Copy all parameters that the other has, but those of some parts."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if not name.startswith(but or ("-",)):
                ours.get_parameter(name).copy_(parameter)
