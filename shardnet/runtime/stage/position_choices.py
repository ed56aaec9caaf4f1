"""The positions that rows attend to, from a layer of one stage to layers of the next.

Knows how they travel beside hidden states. Must not know how they are chosen, nor frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardnet.errors import WrongValuesError
from shardnet.model.config.model_config import Indexer
from shardnet.output_params import OutputKind
from shardnet.types import MicroBatch
from shardnet.wire.payloads.rows import RowBlock


def blocks_of_choice(batch: MicroBatch, chosen: Tensor | None) -> list[RowBlock]:
    """Return the positions `chosen`, int32 [T, n], as blocks: none where rows attend to all."""
    if chosen is None:
        return []
    rows, start, blocks = chosen.to("cpu", torch.float32), 0, []
    for group in batch.groups:
        own = rows[start : start + group.n_rows].contiguous()
        start += group.n_rows
        blocks.append(
            RowBlock(
                sequence_id=group.sequence_id,
                kind=OutputKind.HIDDEN,
                position=group.position,
                width=rows.shape[1],
                payload=own.numpy().tobytes(),
                is_deep=True,
                is_choice=True,
            )
        )
    return blocks


def choice_of_blocks(
    batch: MicroBatch, blocks: Sequence[RowBlock], indexer: Indexer, device: torch.device
) -> Tensor | None:
    """Return what `blocks_of_choice` was given. Raises WrongValuesError for no such choice."""
    found = [block for block in blocks if block.is_choice]
    due = [
        (group.sequence_id, group.position + n)
        for group in batch.groups
        for n in range(group.n_rows)
    ]
    positions = [position for _, position in due]
    n_pooled, width = indexer.n_pooled, indexer.n_attended
    n_entries = indexer.n_chosen // n_pooled
    if (max(positions, default=0) + 1) // n_pooled <= n_entries and not found:
        return None
    rows = [torch.frombuffer(bytearray(block.payload), dtype=torch.float32) for block in found]
    came = [(block.sequence_id, block.position + n) for block in found for n in range(block.n_rows)]
    if came != due or any(block.width != width for block in found):
        raise WrongValuesError.received(f"step {batch.step} came without the positions of its rows")
    chosen = torch.cat(rows).to(torch.int32).view(-1, width)
    ends = torch.tensor(positions, dtype=torch.int32)[:, None]
    n_whole = torch.clamp((ends + 1) // n_pooled, max=n_entries)
    is_taken = torch.arange(width) < n_whole * n_pooled + (ends + 1) % n_pooled
    ascends = (chosen[:, 1:] > chosen[:, :-1]) | ~is_taken[:, 1:]
    is_seen = torch.where(is_taken, (chosen >= 0) & (chosen <= ends), chosen == -1)
    if not (bool(ascends.all()) and bool(is_seen.all())):
        raise WrongValuesError.received(f"step {batch.step} came with positions that are none")
    return chosen.to(device)
