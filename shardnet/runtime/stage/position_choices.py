"""The positions that rows attend to, from a layer of one stage to layers of the next.

Knows how they travel beside hidden states. Must not know how they are chosen, nor frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardnet.errors import WrongValuesError
from shardnet.model.config.model_config import ModelConfig
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
    batch: MicroBatch,
    blocks: Sequence[RowBlock],
    config: ModelConfig,
    layer: int,
    device: torch.device,
) -> Tensor | None:
    """Return what `blocks_of_choice` was given before the absolute `layer`.

    Raises WrongValuesError for no such choice.
    """
    found = [block for block in blocks if block.is_choice]
    due = [
        (group.sequence_id, group.position + n)
        for group in batch.groups
        for n in range(group.n_rows)
    ]
    ends = torch.tensor([position for _, position in due], dtype=torch.int32)[:, None]
    if (own := config.compressed) is not None:
        n_pooled, n_entries, width = own.rates[layer], own.indexer.n_chosen, own.n_chosen
    else:
        indexer = config.indexer
        assert indexer is not None
        n_pooled, width = indexer.n_pooled, indexer.n_attended
        n_entries = indexer.n_chosen // n_pooled
    if int(ends.max() + 1) // n_pooled <= n_entries and not found:
        return None
    rows = [torch.frombuffer(bytearray(block.payload), dtype=torch.float32) for block in found]
    came = [(block.sequence_id, block.position + n) for block in found for n in range(block.n_rows)]
    if came != due or any(block.width != width for block in found):
        raise WrongValuesError.received(f"step {batch.step} came without the positions of its rows")
    chosen = torch.cat(rows).to(torch.int32).view(-1, width)
    if own is not None:
        n_seen = (ends + 1) // n_pooled
        are_seen = _are_numbers(chosen[:, :n_entries], n_seen) and _are_numbers(
            chosen[:, n_entries:], -(-n_seen // own.block_size)
        )
    else:
        are_seen = _are_positions(chosen, ends, n_pooled, n_entries)
    if not are_seen:
        raise WrongValuesError.received(f"step {batch.step} came with positions that are none")
    return chosen.to(device)


def _are_positions(chosen: Tensor, ends: Tensor, n_pooled: int, n_entries: int) -> bool:
    """Whether rows that end at positions [T, 1] see what is chosen, as many as they should."""
    n_whole = torch.clamp((ends + 1) // n_pooled, max=n_entries)
    is_taken = torch.arange(chosen.shape[1]) < n_whole * n_pooled + (ends + 1) % n_pooled
    ascends = (chosen[:, 1:] > chosen[:, :-1]) | ~is_taken[:, 1:]
    is_seen = torch.where(is_taken, (chosen >= 0) & (chosen <= ends), chosen == -1)
    return bool(ascends.all() and is_seen.all())


def _are_numbers(chosen: Tensor, n_seen: Tensor) -> bool:
    """Whether numbers [T, n] ascend below those that are seen, [T, 1], with -1 behind the last."""
    ascends = (chosen[:, 1:] > chosen[:, :-1]) | (chosen[:, 1:] == -1)
    return bool(ascends.all() and ((chosen >= -1) & (chosen < n_seen)).all())
