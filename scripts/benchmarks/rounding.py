"""How far a file's log-probabilities are from its own in float32, by what is rounded on the way.

Knows the stage of a whole model, whose hidden states it rounds between layers in ways that no ring
does, to see what each would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.model.layers.attention import ForwardStep
from shardnet.stage.load import load_stage
from shardnet.types import (
    Arith,
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

Logits = NDArray[np.float32]
"""Logits [T, V]."""
CPU = torch.device("cpu")
COLUMNS = ("worst of 5, mean", "rms", "KL", "perplexity", "float32's")


def to_two(rows: Tensor) -> Tensor:
    """Round to the sum of two bfloat16: 16 significant bits."""
    high = rows.bfloat16().float()
    return high + (rows - high).bfloat16().float()


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda rows: rows.bfloat16().float(),
    "float16": lambda rows: rows.half().float(),
    "two bfloat16": to_two,
    "float32": lambda rows: rows,
}


@dataclass(slots=True)
class Distance:
    """Distances from logits in float32, added up row by row.

    `worst` has for each row how far the worst of its five likeliest tokens is; `rms` and `kl` the
    root of the mean square, weighted by probability, and the divergence; all in nats. `lost` are
    the losses of both, by token.
    """

    worst: list[float]
    rms: list[float]
    kl: list[float]
    lost: list[tuple[float, float]]

    def add(self, found: Logits, exact: Logits, token_ids: Sequence[int]) -> None:
        """Take the logits [T, V] of a text."""
        for place, (row, exact_row) in enumerate(zip(found, exact, strict=True)):
            ours, theirs = log_probabilities(row), log_probabilities(exact_row)
            weights, off = np.exp(theirs), ours - theirs
            likeliest = np.argpartition(-theirs, 5)[:5]
            self.worst.append(float(np.abs(off[likeliest]).max()))
            self.rms.append(float(np.sqrt((weights * off**2).sum())))
            self.kl.append(float(-(weights * off).sum()))
            if place + 1 < len(token_ids):
                following = token_ids[place + 1]
                self.lost.append((-float(ours[following]), -float(theirs[following])))

    def cells(self) -> list[str]:
        """Write the figures of COLUMNS."""
        ours, theirs = np.exp(np.array(self.lost).mean(0))
        means = (float(np.mean(each)) for each in (self.worst, self.rms, self.kl))
        return [*(f"{mean:.3g}" for mean in means), f"{ours:.4f}", f"{theirs:.4f}"]


def distance(
    logits_of: Callable[[Sequence[int]], Logits],
    texts: Sequence[Sequence[int]],
    exact: Sequence[Logits],
) -> Distance:
    """Measure how far the logits of texts are from the exact ones."""
    found = Distance([], [], [], [])
    for token_ids, expected in zip(texts, exact, strict=True):
        found.add(logits_of(token_ids), expected, token_ids)
    return found


def log_probabilities(row: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the log-probabilities of a row of logits [V]."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    made: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return made


def roundings(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], exact: Sequence[Logits]
) -> Iterator[tuple[str, Distance]]:
    """Yield the distance of each way to round, by its name.

    Hidden states after each layer; where torch computes, without rounding rows to int8, also keys
    and values; and all as a CPU with instructions for bfloat16 could.
    """
    own = checkpoint.config.checkpoint_dtype
    usual = probe(CPU, DType.BFLOAT16, own, is_packed=True)
    with stage_logits(checkpoint, usual) as logits_of:
        yield "here", distance(logits_of, texts, exact)
    fast = probe(CPU, DType.BFLOAT16, own)
    if fast.dtype is DType.BFLOAT16:
        with stage_logits(checkpoint, fast) as logits_of:
            yield "all by instructions for bfloat16", distance(logits_of, texts, exact)
    wide = probe(CPU, DType.FLOAT32, own, None, Arith.PORTABLE)
    wide = replace(wide, hidden_dtype=DType.FLOAT16)  # has layers computed one by one
    for name, rounded in ROUNDED.items():
        with (
            patch.object(ForwardStep, "after_layer", lambda _, rows, to=rounded: to(rows)),
            stage_logits(checkpoint, wide) as logits_of,
        ):
            yield f"hidden states in {name}", distance(logits_of, texts, exact)
    if native_kernels() is not None:
        return
    wide = replace(wide, hidden_dtype=None)
    for name in ("bfloat16", "float16"):
        with (
            patch.object(KvCache, "quantize", lambda _, rows, to=ROUNDED[name]: to(rows)),
            stage_logits(checkpoint, wide) as logits_of,
        ):
            yield f"keys and values in {name}", distance(logits_of, texts, exact)


@contextmanager
def stage_logits(
    checkpoint: Checkpoint, choice: KernelChoice
) -> Iterator[Callable[[Sequence[int]], Logits]]:
    """Give a function that computes the logits [T, V] of a text with the whole model."""
    stage = load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=choice,
        device=CPU,
        room_blocks=16,
        progress=lambda done, total: None,
    )

    def logits_of(token_ids: Sequence[int]) -> Logits:
        group = RowGroup(
            sequence_id=SequenceId(0),
            slot=SlotId(0),
            position=0,
            n_rows=len(token_ids),
            n_sampled=len(token_ids),
        )
        batch = MicroBatch(
            epoch=Epoch(0), step=StepId(0), groups=(group,), token_ids=list(token_ids)
        )
        logits: Logits = stage.logits(stage.run(batch, None)).float().numpy().copy()
        stage.kv.free(SlotId(0))
        return logits

    yield logits_of
