"""Stages in one process, driven without a network: what the ring does, as plain calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.fused.decode_graphs import Capture
from shardnet.model.kernels.codec import pack_rows, torch_dtype, unpack_rows
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.model.shards.group import ShardGroup
from shardnet.stage.load import load_stage
from shardnet.stage.runs import Run, sampled_rows
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    DType,
    Epoch,
    KvDType,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
    blocks_for,
)

CPU = torch.device("cpu")
ROOM_BLOCKS = 64

probed = functools.cache(probe)
"""`probe`, each question asked once: the machine answers the same every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One group: the token ids `ids` of `slot` from `position` on; the last `n_sampled` sampled.

    The last `n_drafts` positions up to the last may be rejected.
    """

    slot: int
    position: int
    ids: Sequence[int]
    n_sampled: int
    n_drafts: int = 0


def batch_of(groups: Sequence[Rows]) -> MicroBatch:
    """Put the rows of some sequences together, one behind the other."""
    return MicroBatch(
        epoch=Epoch(1),
        step=StepId(1),
        groups=tuple(
            RowGroup(
                sequence_id=SequenceId(rows.slot),
                slot=SlotId(rows.slot),
                position=rows.position,
                n_rows=len(rows.ids),
                n_sampled=rows.n_sampled,
                n_drafts=rows.n_drafts,
            )
            for rows in groups
        ),
        token_ids=[token_id for rows in groups for token_id in rows.ids],
    )


class StageChain:
    """The stages of one model, first to last."""

    def __init__(self, stages: Sequence[StageModel]) -> None:
        self.stages = stages

    @classmethod
    def load(
        cls,
        folder: Path,
        ranges: Sequence[LayerRange],
        choice: KernelChoice | None = None,
        context: int | None = None,
        kv_dtype: KvDType = KvDType.AUTO,
        capture: Capture | None = None,
        group: ShardGroup | None = None,
        device: torch.device = CPU,
        *,
        shares: Sequence[int] = (),
        has_mtp: bool = False,
    ) -> StageChain:
        """Load a checkpoint's layers, split as `ranges` say; by default as probed for float32."""
        checkpoint = Checkpoint.open(folder)
        if has_mtp:
            checkpoint.use_mtp()
        choice = replace(choice or probed(CPU, DType.FLOAT32, None), kv_form=kv_dtype)
        return cls(
            [
                load_stage(
                    checkpoint,
                    layers,
                    choice=choice,
                    device=device,
                    room_blocks=max(ROOM_BLOCKS, blocks_for(context or 0)),
                    progress=lambda done, total: None,
                    context=context,
                    capture=capture,
                    group=group,
                    shares=shares,
                )
                for layers in ranges
            ]
        )

    def step(
        self, *groups: Rows, hidden: Tensor | None = None, pictures: PictureRows | None = None
    ) -> Tensor:
        """Send one micro-batch through the stages: float32 logits of the sampled rows.

        A chain that does not begin at the first stage takes `hidden`, one that does not end at the
        last returns it.
        """
        batch = batch_of(groups)
        choices: list[Tensor | None] = []
        for stage in self.stages:
            if hidden is not None:  # as the wire does
                hidden = hidden.to(torch_dtype(stage.choice.hidden_dtype or stage.choice.dtype))
            run = Run(batch=batch, hidden=hidden, pictures=pictures, choices=choices[-1:])
            hidden, choices = stage.run_alone(run), run.choices
            if stage.last:
                hidden = stage.logits(sampled_rows(hidden, batch))
        assert hidden is not None
        return hidden

    def prefill(self, slot: int, prompt: Sequence[int]) -> Tensor:
        """Send a prompt in chunks: logits [len(prompt), V] of all its rows."""
        return torch.cat(
            [
                self.step(Rows(slot=slot, position=start, ids=ids, n_sampled=len(ids)))
                for start in range(0, len(prompt), PREFILL_CHUNK_ROWS)
                for ids in [prompt[start : start + PREFILL_CHUNK_ROWS]]
            ]
        )

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Tensor]:
        """Prefill each prompt in its own slot, then decode greedily, all sequences in one batch.

        Returns for each the logits [len(prompt) + n_tokens - 1, V] of all rows it ran.
        """
        logits = [[self.prefill(slot, prompt)] for slot, prompt in enumerate(prompts)]
        for step in range(n_tokens - 1):
            out = self.step(
                *(
                    Rows(
                        slot=slot,
                        position=len(prompt) + step,
                        ids=[int(logits[slot][-1][-1].argmax())],
                        n_sampled=1,
                    )
                    for slot, prompt in enumerate(prompts)
                )
            )
            for slot, row in enumerate(out):
                logits[slot].append(row[None])
        return [torch.cat(parts) for parts in logits]


class RoundingChain(StageChain):
    """The stages of one model, rows rounded between them as on a wire of `dtype`."""

    def __init__(self, stages: Sequence[StageModel], dtype: WireDType) -> None:
        super().__init__(stages)
        self.dtype = dtype

    def step(self, *groups: Rows, hidden: Tensor | None = None) -> Tensor:
        """As StageChain's, from the first stage to the last."""
        for stage in self.stages:
            if hidden is not None:
                payload = pack_rows(hidden, self.dtype)
                hidden = unpack_rows(payload, self.dtype, *hidden.shape, CPU)
            hidden = stage.forward(batch_of(groups), hidden)
        assert hidden is not None
        return hidden


def even_split(n_layers: int, n_stages: int) -> list[LayerRange]:
    """Cut `[0, n_layers)` into `n_stages` ranges of nearly equal length."""
    cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    return [LayerRange(start, end) for start, end in itertools.pairwise(cuts)]


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Draw `length` token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return ids
