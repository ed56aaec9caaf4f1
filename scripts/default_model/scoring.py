"""The held-out score: a loss that does not depend on the tokenizer.

This module knows losses. It must not know files or training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from default_model.corpus import BOS_ID, EOS_ID, encode

SCORING_CONTEXT = 512  # a constant, so that scores of different models compare
IGNORED = -100  # the target that F.cross_entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Loss on the held-out text, in units that do and do not depend on the tokenizer."""

    nats_per_token: float
    bits_per_byte: float
    n_tokens: int
    n_bytes: int


def loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss in nats, computed with bfloat16 matrix products."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def windows(
    ids: Sequence[int], context: int = SCORING_CONTEXT
) -> Iterator[tuple[list[int], list[int]]]:
    """Cut one chapter into half-overlapping windows; each token is a target exactly once.

    Every window begins with bos, as in training, in the place of the oldest token.
    """
    half = context // 2
    for start in range(0, max(1, len(ids) - 1 - half), half):
        window = list(ids[start : start + context + 1])
        targets = window[1:]
        if start:
            window[0], targets[:half] = BOS_ID, [IGNORED] * half
        padding = context - len(targets)
        yield window[:-1] + [EOS_ID] * padding, targets + [IGNORED] * padding


@torch.no_grad()
def score(model: nn.Module, tokenizer: Tokenizer, chapters: Sequence[str]) -> Score:
    """Score chapters, each from its own bos to its eos, seeing at most SCORING_CONTEXT tokens."""
    pairs = [w for c in chapters for w in windows(encode(tokenizer, c))]
    nats, n_tokens = 0.0, 0
    for start in range(0, len(pairs), 8):
        inputs, targets = (torch.tensor(t) for t in zip(*pairs[start : start + 8], strict=True))
        nats += float(loss_sum(model, inputs, targets))
        n_tokens += int((targets != IGNORED).sum())
    n_bytes = sum(len(c.encode()) for c in chapters)
    return Score(
        nats_per_token=nats / n_tokens,
        bits_per_byte=nats / math.log(2) / n_bytes,
        n_tokens=n_tokens,
        n_bytes=n_bytes,
    )
