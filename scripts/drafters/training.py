"""How drafters learn to say what the model would say, or what a given text says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block import BLOCK, Block
from .chains import Chain
from .layer import Keys

N_STEPS, STEP_DECAY = 4, 0.8
"""Steps behind its own outputs that a chain is trained on, and how much less each weighs."""
BLOCK_DECAY, N_ANCHORS = 4.0, 32
"""The weight of a block's draft falls by e over so many; blocks of a text in a batch."""


@dataclass(frozen=True)
class Texts:
    """Tokens ids [N, T], states by layer [N, T, E], and whether the model wrote them [N]."""

    ids: Tensor
    states: dict[int, Tensor]
    own: Tensor
    table: Tensor

    def some(self, chosen: Tensor) -> Texts:
        """Return those of these numbers."""
        states = {layer: rows[chosen].float() for layer, rows in self.states.items()}
        return Texts(self.ids[chosen], states, self.own[chosen], self.table)

    def led(self, n_tokens: int) -> Texts:
        """Put the beginning before the texts again."""
        if not n_tokens:
            return self
        states = {n: torch.cat((rows[:, :n_tokens], rows), 1) for n, rows in self.states.items()}
        ids = torch.cat((self.ids[:, :n_tokens], self.ids), 1)
        return Texts(ids, states, self.own, self.table)

    def meant(self) -> Tensor:
        """Return [N, T - 1, V]: how likely each token behind the first is."""
        last = self.states[max(self.states)][:, :-1]
        meant = (last @ self.table.T).softmax(-1)
        given = F.one_hot(self.ids[:, 1:], len(self.table)).to(meant.dtype)
        return torch.where(self.own[:, None, None], meant, given)


@torch.no_grad()
def read(model: Any, ids: Tensor, own: Tensor, layers: tuple[int, ...]) -> Texts:
    """Compute the states after so many layers, in the type in which they travel."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for part in torch.split(ids, 16):
        hidden = model.model(part, output_hidden_states=True).hidden_states
        for layer in layers:
            found[layer].append(hidden[layer])
    states = {layer: torch.cat(parts).bfloat16() for layer, parts in found.items()}
    return Texts(ids, states, own, model.model.embed_tokens.weight.detach())


def chain_loss(chain: Chain, texts: Texts) -> Tensor:
    """Train a chain behind its own outputs, on the text's tokens."""
    texts = texts.led(chain.n_before)
    meant, embedded = texts.meant(), texts.table[texts.ids]
    keys = [Keys() for _ in range(chain.n_layers)]
    known = chain.read({layer: rows[:, :-2] for layer, rows in texts.states.items()})
    n_rows = known.shape[1]
    total = torch.zeros(())
    for step in range(N_STEPS):
        tokens = F.pad(embedded[:, 1 + step :], (0, 0, 0, step + 1))[:, :n_rows]
        known, rows = chain.step(known, tokens, keys)
        held = n_rows - step
        scores = chain.score(rows[:, :held], texts.table)
        total = total + STEP_DECAY**step * loss(scores, meant[:, 1 + step :], chain.vocabulary)
    return total


def block_loss(block: Block, texts: Texts) -> Tensor:
    """Train a block drafter at places of the texts."""
    anchors = torch.randint(1, texts.ids.shape[1] - BLOCK, (N_ANCHORS,))
    rows = block(texts.states, texts.ids, anchors, texts.table)[:, :, 1:]
    places = anchors[:, None] + torch.arange(BLOCK - 1)
    weights = torch.exp(-torch.arange(BLOCK - 1) / BLOCK_DECAY)
    return loss(rows @ texts.table.T, texts.meant()[:, places], None, weights)


def loss(
    scores: Tensor, meant: Tensor, vocabulary: Tensor | None, weights: Tensor | None = None
) -> Tensor:
    """Say how far scores [..., V] are from what is meant, in nats, where it can be said."""
    counted = torch.ones(meant.shape[:-1]) if weights is None else weights.expand(meant.shape[:-1])
    if vocabulary is not None:
        likeliest = meant.argmax(-1)
        meant = meant[..., vocabulary]
        meant = meant / meant.sum(-1, keepdim=True).clamp_min(1e-9)
        counted = counted * torch.isin(likeliest, vocabulary)
    missed = -(meant * F.log_softmax(scores, -1)).sum(-1)
    return (missed * counted).sum() / counted.sum().clamp_min(1)


def train(
    drafter: nn.Module,
    texts: Texts,
    loss_of: Callable[[Texts], Tensor],
    *,
    n_steps: int,
    bfloat16: bool,
    n_texts: int = 8,
    rate: float = 2e-3,
) -> None:
    """Train in place, printing the loss now and then; products are `bfloat16` or float32."""
    began, seen = time.perf_counter(), 0.0
    backward: Any = torch.autograd.backward
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95))
    for step in range(n_steps):
        share = (step + 1) / n_steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 20 * share) * 0.5 * (1 + math.cos(math.pi * share))
        chosen = texts.some(torch.randint(len(texts.ids), (n_texts,)))
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            missed = loss_of(chosen)
        optimizer.zero_grad()
        backward(missed)
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        seen += float(missed.detach())
        if step % 25 == 24:
            seconds, mean, seen = time.perf_counter() - began, seen / 25, 0.0
            print(f"step {step + 1}: loss {mean:.3f}, {seconds:.0f} s", flush=True)
