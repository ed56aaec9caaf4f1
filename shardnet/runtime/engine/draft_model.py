"""A drafter on a thread of its own: a small model, or one that reads hidden states of the ring.

Knows how to run it, greedily, for several sequences (design decision 5). Must not know the ring,
nor which drafts are accepted: rejected ones are overwritten by position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError
from shardnet.model.kernels.linear import probe
from shardnet.runtime.engine.model_drafts import MAX_DRAFTED_SEQUENCES, Ask, DraftHost
from shardnet.runtime.loading.loading import kv_room, set_compute_threads
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


class StateDrafter(Protocol):
    """A drafter that reads the ring's hidden states after so many layers as each of `layers` says.

    It makes at most `most` drafts at once.
    """

    layers: tuple[int, ...]
    context: int
    most: int

    def draft(
        self, slot: SlotId, token_ids: Sequence[int], position: int, states: Tensor, limit: int
    ) -> list[int]:
        """Read states [T, E x layers] of the positions from `position` on, and draft.

        The token ids are those behind each of these positions. The slot's keys and values are cut
        to `position` first.
        """

    def free(self, slot: SlotId) -> None:
        """Forget a slot."""


class DraftModel(DraftHost):
    """A drafter that is loaded here. It computes on `executor`, all else is on the event loop."""

    def __init__(self, model: StageModel | StateDrafter, executor: Executor) -> None:
        if isinstance(model, StageModel):
            super().__init__()
        else:
            super().__init__(model.layers, model.most)
        self.model, self.executor = model, executor
        self.n_steps = 0
        """Steps it has computed."""

    def close(self) -> None:
        """End the thread; see DraftHost."""
        super().close()
        self.executor.close()

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        """See DraftHost."""
        return self.executor.submit(lambda: self._draft(ask), alive=lambda: self.n_steps)

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        """See DraftHost."""
        return self.executor.submit(lambda: self._forget(slot))

    def _draft(self, ask: Ask) -> list[int]:
        """Return the likeliest tokens behind those of `ask`, one after the other.

        Raises CapacityError when the text outgrows the model's context or its room.
        """
        if not isinstance(self.model, StageModel):
            return self._draft_of_states(self.model, ask)
        for start in range(0, len(ask.token_ids), PREFILL_CHUNK_ROWS):
            rows = ask.token_ids[start : start + PREFILL_CHUNK_ROWS]
            n_drafts = max(0, start + len(rows) + ask.n_drafts - len(ask.token_ids))
            token = self._next(self.model, ask.slot, rows, ask.position + start, n_drafts)
        drafts = [token]
        end = ask.position + len(ask.token_ids)
        while len(drafts) < ask.limit and not ask.is_over:
            position, n_drafts = end + len(drafts) - 1, ask.n_drafts + len(drafts)
            drafts.append(self._next(self.model, ask.slot, drafts[-1:], position, n_drafts))
        return drafts

    def _next(
        self, model: StageModel, slot: SlotId, rows: Sequence[int], position: int, n_drafts: int
    ) -> int:
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
        return int(model.forward(batch, None)[0].argmax())

    def _draft_of_states(self, model: StateDrafter, ask: Ask) -> list[int]:
        self.n_steps += 1
        n_rows = len(ask.token_ids)
        states = torch.frombuffer(bytearray(ask.states), dtype=torch.bfloat16).view(n_rows, -1)
        limit = 0 if ask.is_over else ask.limit
        return model.draft(ask.slot, ask.token_ids, ask.position, states, limit)

    def _forget(self, slot: SlotId) -> None:
        if isinstance(self.model, StageModel):
            self.model.kv.free(slot)
        else:
            self.model.free(slot)


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
