"""A small draft model that runs beside the ring (design decision 5).

Knows how to run a whole model on a thread of its own, greedily, for several sequences. Must not
know the ring, nor which drafts are accepted: rejected ones are overwritten by position.
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
from shardnet.runtime.loading.loading import kv_room, set_compute_threads
from shardnet.runtime.scheduling.drafting import MAX_DRAFT_TOKENS
from shardnet.runtime.scheduling.kv_block_manager import common_prefix
from shardnet.runtime.stage.executor import COMPUTE_SILENCE_S, Executor
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

MAX_DRAFTED_SEQUENCES = 8
"""Sequences that it drafts for at the same time; others get no drafts."""


@dataclass(slots=True, eq=False)
class DraftModel:
    """A loaded draft model. `draft` runs on `executor`, everything else on the event loop."""

    model: StageModel
    executor: Executor
    _free_slots: list[SlotId] = field(
        default_factory=lambda: [*map(SlotId, range(MAX_DRAFTED_SEQUENCES))]
    )
    is_closed: bool = False
    n_long: int = 0
    """Texts of which more than a chunk is to be read now: nobody waits for drafts meanwhile."""
    n_steps: int = 0
    """Steps it has computed."""

    def close(self) -> None:
        """End the thread. Draft sources that are in use draft nothing more."""
        self.is_closed = True
        self.executor.close()

    def draft_source(self, wake: Callable[[], None]) -> ModelDrafts:
        """Make the draft source of one sequence; it proposes nothing if all slots are taken."""
        slot = self._free_slots.pop() if self._free_slots else None
        return ModelDrafts(self, slot, wake)

    def give_back(self, slot: SlotId) -> None:
        """Release a slot when its last draft is done."""
        if self.is_closed:
            return
        self.executor.submit(lambda: self.model.kv.free(slot)).add_done_callback(
            lambda _: self._free_slots.append(slot)
        )

    def draft(self, slot: SlotId, tokens: Sequence[int], n_held: int, limit: int) -> list[int]:
        """Return the `limit` likeliest tokens after `tokens`, one after the other.

        The slot holds the first `n_held` positions of `tokens`. Raises CapacityError when the
        text outgrows the model's context or its room.
        """
        for start in range(n_held, len(tokens), PREFILL_CHUNK_ROWS):
            rows = tokens[start : start + PREFILL_CHUNK_ROWS]
            token = self._next(slot, rows, start)
        drafts = [token]
        while len(drafts) < limit:
            position = len(tokens) + len(drafts) - 1
            drafts.append(self._next(slot, drafts[-1:], position, n_drafts=len(drafts)))
        return drafts

    def _next(self, slot: SlotId, rows: Sequence[int], position: int, n_drafts: int = 0) -> int:
        group = RowGroup(
            sequence_id=SequenceId(slot),
            slot=slot,
            position=position,
            n_rows=len(rows),
            n_sampled=1,
            n_drafts=n_drafts,
        )
        self.n_steps += 1
        batch = MicroBatch(epoch=Epoch(0), step=StepId(0), groups=(group,), token_ids=tuple(rows))
        return int(self.model.forward(batch, None)[0].argmax())


class ModelDrafts:
    """Drafts for one sequence (drafting.DraftSource), computed while the ring does other work."""

    kinds: Sequence[int] = range(MAX_DRAFT_TOKENS)
    flies = False

    def __init__(self, draft: DraftModel, slot: SlotId | None, wake: Callable[[], None]) -> None:
        self._draft = draft
        self._slot = slot
        self._wake = wake
        self._job: asyncio.Future[list[int]] | None = None
        self._held: list[int] = []
        self._n_tokens = 0
        self._drafted: list[int] = []

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Start drafting on the thread; see DraftSource.

        While the thread reads a long text, as a prompt is, sequences go on without drafts.
        """
        if self._slot is None or self._n_tokens == len(tokens):
            return True
        if self._job is None:
            if self._draft.is_closed:
                return True
            slot, text = self._slot, list(tokens)
            n_held = common_prefix(self._held, text, min(len(self._held), len(text) - 1))
            is_long = len(text) - n_held > PREFILL_CHUNK_ROWS
            self._draft.n_long += is_long
            self._job = self._draft.executor.submit(
                lambda: self._draft.draft(slot, text, n_held, limit),
                alive=lambda: self._draft.n_steps,
            )
            self._job.add_done_callback(lambda job: self._take(text, job, is_long=is_long))
        return self._draft.n_long > 0

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the drafts made for exactly these tokens; none if they are for others."""
        return self._drafted[:limit] if self._n_tokens == len(tokens) else []

    def close(self) -> None:
        """Release the slot."""
        if self._slot is not None:
            self._draft.give_back(self._slot)
            self._slot = None

    def _take(self, text: list[int], job: asyncio.Future[list[int]], *, is_long: bool) -> None:
        """Keep the drafts of a finished job. After a failure the model is not asked again."""
        self._job = None
        self._draft.n_long -= is_long
        if self._slot is None:
            return
        error = None if job.cancelled() else job.exception()
        if job.cancelled():  # the model was closed
            self.close()
        elif isinstance(error, ShardnetError):
            log.warning("the draft model stops drafting for this text: %s", error)
            self.close()
        elif error is not None:  # our own bug: the ring continues without drafts
            log.error("the draft model failed", exc_info=error)
            self.close()
        else:
            self._n_tokens, self._drafted = len(text), job.result()
            self._held = [*text, *self._drafted[:-1]]
        self._wake()


def load_draft_model(
    path: Path,
    *,
    vocab_size: int,
    device: str,
    context: int,
    memory_bytes: int,
    threads: int,
    ignore_unknown_config: bool = False,
) -> DraftModel:
    """Load the whole model at `path` into at most `memory_bytes`, its KV cache included.

    Runs on a loading thread. `vocab_size` is the ring's. Raises CheckpointError for a model of
    another vocabulary, UsageError for one that is computed by modules of transformers,
    UnsupportedModelError for unknown keys of its config unless `ignore_unknown_config`,
    CapacityError when it does not fit.
    """
    checkpoint = Checkpoint.open(path, ignore_unknown_config=ignore_unknown_config)
    config = checkpoint.config
    if config.vocab_size != vocab_size:
        raise CheckpointError(
            f"--speculate {path}: the draft model has {config.vocab_size} token ids, the model of "
            f"the ring {vocab_size}",
            remedy="name a smaller model of the same family",
        )
    layers = LayerRange(0, config.n_layers)
    kind = torch.device(device)
    choice = probe(kind, config.checkpoint_dtype or DType.FLOAT32, config.checkpoint_dtype)
    context = min(context, config.max_positions)
    form = weight_form(checkpoint, choice)
    room_blocks = min(
        kv_room(config, layers, form, context, memory_bytes, device=kind.type).blocks,
        MAX_DRAFTED_SEQUENCES * blocks_for(context),
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
    executor = Executor(
        "shardnet-draft",
        set_up=lambda: set_compute_threads(threads),
        silence_s=COMPUTE_SILENCE_S,
    )
    return DraftModel(model, executor)
