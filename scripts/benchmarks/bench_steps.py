"""The micro-batches that benchmarks run: rows of some sequences, each in a slot of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId


def make_step(
    rows: Iterable[tuple[int, int, Sequence[int]]], *, n_sampled: int | None = 1
) -> MicroBatch:
    """Make a step of (slot, position, token ids) of each sequence.

    The last `n_sampled` of each are sampled, with None all.
    """
    rows = tuple(rows)
    return MicroBatch(
        epoch=Epoch(1),
        step=StepId(1),
        groups=tuple(
            RowGroup(
                sequence_id=SequenceId(slot),
                slot=SlotId(slot),
                position=position,
                n_rows=len(ids),
                n_sampled=len(ids) if n_sampled is None else n_sampled,
            )
            for slot, position, ids in rows
        ),
        token_ids=[token_id for _, _, ids in rows for token_id in ids],
    )
