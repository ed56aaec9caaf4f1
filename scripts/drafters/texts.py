"""Texts that drafters are trained on: what the model writes itself, and this repository's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
BOS = 0
GIVEN = {
    "code": ("shardnet", "*.py"),
    "json": ("tests/model/families/published", "*.json"),
    "chat": ("docs", "*.md"),
}
"""Where texts of a kind are found."""


@torch.no_grad()
def own_texts(model: Any, n_texts: int, length: int) -> Tensor:
    """Have the model write texts [N, T], each from one token on, some of them greedily."""
    texts = torch.zeros(n_texts, 2, dtype=torch.long)
    texts[:, 1] = torch.randint(2, model.config.vocab_size, (n_texts,))
    return go_on(model, texts, length, torch.tensor([0.0, 0.6, 0.8, 1.0]).repeat(n_texts // 4))


@torch.no_grad()
def go_on(model: Any, texts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """Have the model go on behind texts [N, T] until they have `length` tokens."""
    cache = None
    while texts.shape[1] < length:
        ids = texts if cache is None else texts[:, -1:]
        out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.cache
        logits[:, :2] = -torch.inf  # no text ends
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        said = (logits + temperatures[:, None] * noise).argmax(-1, keepdim=True)
        texts = torch.cat((texts, said), 1)
    return texts


def given_texts(tokenizer: Any, n_texts: int, length: int, seed: int) -> Tensor:
    """Cut texts [N, T] of every kind from this repository's files, and edits of its code."""
    chosen = random.Random(seed)
    enough = n_texts * length
    streams = {kind: _stream(tokenizer, *GIVEN[kind], enough, chosen) for kind in GIVEN}
    kinds = [*GIVEN, "edit"]
    rows = []
    for number in range(n_texts):
        kind = kinds[number % len(kinds)]
        stream = streams["code" if kind == "edit" else kind]
        start = chosen.randrange(len(stream) - length)
        piece = stream[start : start + length - 1]
        rows.append([BOS, *(_edited(piece, chosen) if kind == "edit" else piece)])
    return torch.tensor(rows)


def _stream(
    tokenizer: Any, folder: str, pattern: str, enough: int, chosen: random.Random
) -> Sequence[int]:
    """Return at least `enough` tokens of files in any order, or those of all."""
    files = sorted((ROOT / folder).rglob(pattern))
    chosen.shuffle(files)
    stream: list[int] = []
    for path in files:
        if len(stream) >= enough:
            break
        stream += tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
    return stream


def _edited(piece: Sequence[int], chosen: random.Random) -> list[int]:
    """Return half of a piece twice, the second time with one token replaced everywhere."""
    first, rest = piece[: (len(piece) + 1) // 2], len(piece) // 2
    old, new = chosen.choice(first), chosen.choice(piece)
    return [*first, *(new if token == old else token for token in first[:rest])]
