"""A small model beside the ring that guesses what the big one will say (design decision 5).

Knows how to run a whole model on a thread of its own, greedily, for several sequences. Must not
know the ring, nor whether its guesses are right: those that were wrong are overwritten by position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.model.kernels.linear import probe
from shardnet.runtime.scheduling.kv_block_manager import common_prefix
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.loading import kv_room_blocks, use_threads
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    blocks_for,
)

log = logging.getLogger(__name__)

MAX_GUESSERS = 8
"""Sequences that it guesses for at once; others go without."""


@dataclass(slots=True, eq=False)
class DraftModel:
    """A loaded model. `guess` runs on `executor`, everything else on the event loop."""

    model: StageModel
    executor: Executor
    _free_slots: list[SlotId] = field(default_factory=lambda: [*map(SlotId, range(MAX_GUESSERS))])

    def close(self) -> None:
        """End the thread."""
        self.executor.close()

    def guesser(self, wake: Callable[[], None]) -> ModelGuesser:
        """Give a sequence its guesser, which has nothing to say where all slots are taken."""
        slot = self._free_slots.pop() if self._free_slots else None
        return ModelGuesser(self, slot, wake)

    def give_back(self, slot: SlotId) -> None:
        """Take a slot back, once its last guess is done."""
        self.executor.submit(lambda: self.model.kv.free(slot)).add_done_callback(
            lambda _: self._free_slots.append(slot)
        )

    def guess(self, slot: SlotId, tokens: Sequence[int], n_held: int, limit: int) -> list[int]:
        """Return the `limit` likeliest tokens after `tokens`, one after the other.

        The slot holds the first `n_held` positions of `tokens`. Raises CapacityError when the
        text outgrows the model's context or its room.
        """
        for start in range(n_held, len(tokens), PREFILL_CHUNK_ROWS):
            rows = tokens[start : start + PREFILL_CHUNK_ROWS]
            token = self._next(slot, rows, start)
        guessed = [token]
        while len(guessed) < limit:
            guessed.append(self._next(slot, guessed[-1:], len(tokens) + len(guessed) - 1))
        return guessed

    def _next(self, slot: SlotId, rows: Sequence[int], position: int) -> int:
        group = RowGroup(
            sequence_id=SequenceId(slot),
            slot=slot,
            position=position,
            n_rows=len(rows),
            n_sampled=1,
        )
        batch = MicroBatch(epoch=Epoch(0), step=StepId(0), groups=(group,), token_ids=tuple(rows))
        return int(self.model.forward(batch, None)[0].argmax())


class ModelGuesser:
    """One sequence's guesses (drafting.Guesser), made while the ring is at other work."""

    def __init__(self, draft: DraftModel, slot: SlotId | None, wake: Callable[[], None]) -> None:
        self._draft = draft
        self._slot = slot
        self._wake = wake
        self._job: asyncio.Future[list[int]] | None = None
        self._held: list[int] = []
        self._n_tokens = 0
        self._guesses: list[int] = []

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Have the model guess; see Guesser."""
        if self._slot is None or self._n_tokens == len(tokens):
            return True
        if self._job is None:
            slot, text = self._slot, list(tokens)
            n_held = common_prefix(self._held, text, min(len(self._held), len(text) - 1))
            self._job = self._draft.executor.submit(
                lambda: self._draft.guess(slot, text, n_held, limit)
            )
            self._job.add_done_callback(lambda job: self._take(text, job))
        return False

    def guess(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Give what was guessed after exactly these tokens."""
        return self._guesses[:limit] if self._n_tokens == len(tokens) else []

    def close(self) -> None:
        """Give the slot back."""
        if self._slot is not None:
            self._draft.give_back(self._slot)
            self._slot = None

    def _take(self, text: list[int], job: asyncio.Future[list[int]]) -> None:
        """Take what the thread has guessed. Where it could not, it is not asked again."""
        self._job = None
        if self._slot is None or job.cancelled():
            return
        error = job.exception()
        if isinstance(error, ShardnetError):
            log.warning("the draft model guesses no more for this text: %s", error)
            self.close()
        elif error is not None:  # our own bug: the ring goes on without guesses
            log.error("the draft model failed", exc_info=error)
            self.close()
        else:
            self._n_tokens, self._guesses = len(text), job.result()
            self._held = [*text, *self._guesses[:-1]]
        self._wake()


def load_draft_model(
    path: Path, *, vocab_size: int, device: str, context: int, memory_bytes: int, threads: int
) -> DraftModel:
    """Load the whole model at `path` into at most `memory_bytes`, its KV cache included.

    Runs on a loading thread. `vocab_size` is the ring's: guesses are its token ids. Raises
    CheckpointError for a model of another vocabulary, CapacityError when it does not fit.
    """
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    if config.vocab_size != vocab_size:
        raise CheckpointError(
            f"--speculate {path}: the model has {config.vocab_size} token ids and the one it "
            f"guesses for has {vocab_size}; name a smaller model of the same family"
        )
    layers = LayerRange(0, config.n_layers)
    kind = torch.device(device)
    choice = probe(kind, config.checkpoint_dtype or DType.FLOAT32, config.checkpoint_dtype)
    context = min(context, config.max_positions)
    form = weight_form(checkpoint, choice)
    room_blocks = min(
        kv_room_blocks(config, layers, form, context, memory_bytes, device=kind.type),
        MAX_GUESSERS * blocks_for(context),
    )
    model = load_stage(
        checkpoint,
        layers,
        choice=choice,
        device=kind,
        room_blocks=room_blocks,
        context=context,
        progress=lambda done, total: None,
    )
    return DraftModel(model, Executor("shardnet-draft", set_up=lambda: use_threads(threads)))
