"""A drafter on a thread of its own: a small model, or one that reads hidden states of the ring.

Knows how to run it, greedily, for several sequences (design decision 5). Must not know the ring,
nor which drafts are accepted: rejected ones are overwritten by position.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.drafters import DrafterFormat, drafter_format
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.drafters.state_drafter import StateDrafter
from shardnet.model.kernels.linear import probe
from shardnet.runtime.engine.model_drafts import (
    MAX_DRAFTED_SEQUENCES,
    Ask,
    DraftHost,
)
from shardnet.runtime.loading.loading import kv_room, set_compute_threads
from shardnet.runtime.scheduling.admission_queue import DRAFT_POSITIONS
from shardnet.runtime.stage.executor import COMPUTE_SILENCE_S, Executor
from shardnet.stage.drafters import StateDrafterLoader
from shardnet.stage.estimate.memory_estimate import kv_block_bytes, stage_weight_bytes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.stage_form import StageForm
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
from shardnet.wire.messages.drafting import Draft


class DraftModel(DraftHost):
    """A drafter that is loaded here. It computes on `executor`, all else is on the event loop."""

    def __init__(
        self,
        model: StageModel | StateDrafter,
        executor: Executor,
        *,
        n_bytes: int = 0,
        width: int = 0,
        vocab_size: int = 0,
    ) -> None:
        """It takes `n_bytes`, and reads rows of states of `width` bytes, 0 for none."""
        if isinstance(model, StageModel):
            super().__init__()
        else:
            super().__init__(model.layers, model.most)
        self.model, self.executor = model, executor
        self.n_steps = 0
        """Steps it has computed."""
        self.n_bytes, self.width, self.vocab_size = n_bytes, width, vocab_size
        self.ended = asyncio.Event()
        """Set once it is unloaded."""

    def close(self) -> None:
        """End the thread; see DraftHost."""
        super().close()
        self.ended.set()
        self.executor.close()

    async def measured_s(self) -> float:
        """Measure what a draft takes, by the second of two in an empty slot."""
        for _ in range(2):
            began_s = time.perf_counter()
            draft = Draft(
                request=0,
                drafter=0,
                slot=SlotId(0),
                position=0,
                token_ids=bytes(4),
                limit=1,
                states=bytes(self.width),
            )
            await self.ask(Ask(draft=draft))
        took_s = time.perf_counter() - began_s
        await self.free(SlotId(0))
        return took_s

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
        draft, token_ids = ask.draft, ask.token_ids
        slot = draft.slot
        if not isinstance(self.model, StageModel):
            return self._draft_of_states(self.model, ask)
        for start in range(0, len(token_ids), PREFILL_CHUNK_ROWS):
            rows = token_ids[start : start + PREFILL_CHUNK_ROWS]
            n_drafts = max(0, start + len(rows) + draft.n_drafts - len(token_ids))
            token = self._next(self.model, slot, rows, draft.position + start, n_drafts)
        drafts = [token][: draft.limit]
        end = draft.position + len(token_ids)
        while len(drafts) < draft.limit and not ask.is_over:
            position, n_drafts = end + len(drafts) - 1, draft.n_drafts + len(drafts)
            drafts.append(self._next(self.model, slot, drafts[-1:], position, n_drafts))
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
        draft, token_ids = ask.draft, ask.token_ids
        states = torch.frombuffer(bytearray(draft.states), dtype=torch.bfloat16)
        rows = states.view(len(token_ids), -1)
        limit = 0 if ask.is_over else draft.limit
        return model.draft(draft.slot, token_ids, draft.position, rows, limit)

    def _forget(self, slot: SlotId) -> None:
        if isinstance(self.model, StageModel):
            self.model.kv.free(slot)
        else:
            self.model.free(slot)


def load_drafter(
    path: Path,
    target: Path | None,
    form: StageForm,
    *,
    vocab_size: int,
    device: str,
    memory_bytes: int,
    threads: int,
    take: Callable[[int], None] = lambda n_bytes: None,
) -> DraftModel:
    """Load the drafter at `path`, whatever it is, for a ring of this form, of the model `target`.

    `take` is called with the bytes that it will take. As load_draft_model, which loads what is a
    model. Raises CheckpointError too for a drafter of another model, and without `target` for one
    that reads its states.
    """
    if drafter_format(path) is DrafterFormat.MODEL:
        return load_draft_model(
            path,
            vocab_size=vocab_size,
            device=device,
            context=form.context,
            memory_bytes=memory_bytes,
            threads=threads,
            ignore_unknown_config=form.ignore_unknown_config,
            take=take,
        )
    if target is None:
        raise CheckpointError(
            f"--speculate {path}: it takes tables of the model, which is not on this node",
            remedy="copy the model there, or draft on the head",
        )
    checkpoint = Checkpoint.open(target, ignore_unknown_config=form.ignore_unknown_config)
    context = min(form.context, 2 * DRAFT_POSITIONS)
    loader = StateDrafterLoader(
        path, checkpoint, device=device, context=context, n_slots=MAX_DRAFTED_SEQUENCES
    )
    if loader.n_bytes > memory_bytes:
        raise CapacityError(
            f"--speculate {path}: it takes {loader.n_bytes} bytes, {memory_bytes} are left",
            remedy="give the node more --memory, or draft on another",
        )
    take(loader.n_bytes)
    drafter, thread = loader.load(), _thread(threads)
    width = 2 * len(drafter.layers) * checkpoint.config.row_width
    return DraftModel(drafter, thread, n_bytes=loader.n_bytes, width=width, vocab_size=vocab_size)


def _thread(threads: int) -> Executor:
    return Executor(
        "shardnet-draft",
        set_up=lambda: set_compute_threads(threads),
        silence_s=COMPUTE_SILENCE_S,
    )


def load_draft_model(
    path: Path,
    *,
    vocab_size: int,
    device: str,
    context: int,
    memory_bytes: int,
    threads: int,
    ignore_unknown_config: bool = False,
    take: Callable[[int], None] = lambda n_bytes: None,
) -> DraftModel:
    """Load the whole model at `path` into at most `memory_bytes`, its KV cache included.

    Runs on a loading thread; see load_drafter. `vocab_size` is the ring's. Raises CheckpointError
    for a model of another vocabulary, UsageError for one that is computed by modules of
    transformers, UnsupportedModelError for unknown keys of its config unless
    `ignore_unknown_config`, CapacityError when it does not fit.
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
    block_bytes = kv_block_bytes(config, layers, form.kv, computed=form.dtype)
    n_bytes = stage_weight_bytes(config, layers, form) + room_blocks * block_bytes
    take(n_bytes)
    model = load_stage(
        checkpoint,
        layers,
        choice=choice,
        device=kind,
        room_blocks=room_blocks,
        context=context,
        progress=lambda done, total: None,
    )
    return DraftModel(model, _thread(threads), n_bytes=n_bytes, vocab_size=vocab_size)
