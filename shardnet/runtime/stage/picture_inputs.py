"""What the rows of a step have of their sequences' pictures, for the layers here and later ones.

Knows where pictures are, and where their encoded rows wait. Must not know towers nor frames.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardnet.errors import ShardnetError, WrongValuesError
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.output_params import OutputKind
from shardnet.runtime.stage.picture_store import PictureStore
from shardnet.slot_operations import PicturePlace, Pictures
from shardnet.types import MicroBatch, RowGroup
from shardnet.wire.payloads.rows import RowBlock


def rows_of_store(
    batch: MicroBatch,
    pictures: Sequence[Pictures],
    store: PictureStore | None,
    *,
    has_axes: bool,
    device: torch.device,
) -> PictureRows | None:
    """Return what a first stage's rows have of the `pictures` of each group, None for nothing.

    Raises ShardnetError where `store` lacks the rows of one.
    """
    if not any(pictures):
        return None
    index: list[int] = []
    rows: list[Tensor] = []
    deep: defaultdict[int, list[Tensor]] = defaultdict(list)
    for start, group, place in _present(batch.groups, pictures):
        stored = store.get(place.digest) if store is not None else None
        if stored is None:
            raise ShardnetError(f"the rows of a picture at position {place.position} are not here")
        first = group.position - place.position
        low = bisect_left(stored.offsets, first)
        high = bisect_left(stored.offsets, first + group.n_rows)
        index += (start - first + offset for offset in stored.offsets[low:high])
        rows.append(stored.encoded.rows[low:high].to(device))
        for layer, added in enumerate(stored.encoded.deep):
            deep[layer].append(added[low:high].to(device))
    return PictureRows(
        index=torch.tensor(index, dtype=torch.int64, device=device),
        rows=torch.cat(rows) if rows else None,
        deep={layer: torch.cat(parts) for layer, parts in deep.items()},
        blocks=_blocks(batch, pictures),
        positions=_positions(batch, pictures, device) if has_axes else None,
    )


def rows_of_blocks(
    batch: MicroBatch,
    pictures: Sequence[Pictures],
    deep: Sequence[RowBlock],
    *,
    width: int,
    has_axes: bool,
    device: torch.device,
    embeds: bool = False,
) -> PictureRows | None:
    """Return what a later stage's rows have of pictures; `deep` came with them.

    With `embeds` what stands in the place of embedded token ids too, for a shard of a first stage.
    Raises WrongValuesError for what belongs to no row of the step.
    """
    if not any(pictures):
        return None
    starts, start = {}, 0
    for group in batch.groups:
        starts[group.sequence_id] = start, group
        start += group.n_rows
    index: dict[int | None, list[int]] = defaultdict(list)
    added: dict[int | None, list[Tensor]] = defaultdict(list)
    for block in deep:
        if block.is_choice:
            continue
        start, at = starts.get(block.sequence_id, (0, None))
        is_inside = at is not None and at.position <= block.position and block.width == width
        is_inside = is_inside and (embeds or block.layer is not None)
        if at is None or not is_inside or block.position + block.n_rows > at.position + at.n_rows:
            raise WrongValuesError.received(f"step {batch.step} came with rows of no picture")
        first = start + block.position - at.position
        layer = block.layer
        index[layer] += range(first, first + block.n_rows)
        part = torch.frombuffer(bytearray(block.payload), dtype=torch.float32)
        added[layer].append(part.reshape(block.n_rows, width).to(device))
    rows = next(iter(index.values()), [])
    if any(others != rows for others in index.values()):
        raise WrongValuesError.received(f"step {batch.step} came with unlike rows of its pictures")
    embedded = added.pop(None, None)
    return PictureRows(
        index=torch.tensor(rows, dtype=torch.int64, device=device),
        rows=torch.cat(embedded) if embedded else None,
        deep={layer: torch.cat(parts) for layer, parts in added.items() if layer is not None},
        blocks=_blocks(batch, pictures),
        positions=_positions(batch, pictures, device) if has_axes else None,
    )


def blocks_for_later(
    batch: MicroBatch, pictures: PictureRows | None, first_layer: int, *, embeds: bool = False
) -> list[RowBlock]:
    """Return what layers from `first_layer` on add to rows of pictures, for the next stage.

    With `embeds` what stands in the place of embedded token ids too, for another shard.
    """
    later: dict[int | None, Tensor] = {
        layer: added
        for layer, added in (pictures.deep if pictures is not None else {}).items()
        if layer >= first_layer
    }
    if embeds and pictures is not None and pictures.rows is not None:
        later[None] = pictures.rows
    if pictures is None or not later:
        return []
    index, start = pictures.index.tolist(), 0
    blocks = []
    for group in batch.groups:
        end = start + group.n_rows
        low, high = bisect_left(index, start), bisect_left(index, end)
        for first, last in _runs(index, low, high):
            for layer, added in later.items():
                rows = added[first:last].to("cpu", torch.float32).contiguous()
                blocks.append(
                    RowBlock(
                        sequence_id=group.sequence_id,
                        kind=OutputKind.HIDDEN,
                        position=group.position + index[first] - start,
                        width=rows.shape[1],
                        payload=rows.numpy().tobytes(),
                        layer=layer,
                        is_deep=True,
                    )
                )
        start = end
    return blocks


def _runs(index: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of places whose rows follow each other."""
    first = low
    for place in range(low + 1, high + 1):
        if place == high or index[place] != index[place - 1] + 1:
            yield first, place
            first = place


def _present(
    groups: Sequence[RowGroup], pictures: Sequence[Pictures]
) -> Iterator[tuple[int, RowGroup, PicturePlace]]:
    """Yield the pictures of which a batch has rows, with the first row of their group."""
    start = 0
    for group, places in zip(groups, pictures, strict=True):
        for place in places:
            if place.position < group.position + group.n_rows and group.position < place.end:
                yield start, group, place
        start += group.n_rows


def _blocks(batch: MicroBatch, pictures: Sequence[Pictures]) -> tuple[tuple[int, int], ...]:
    """Return the rows of the batch that see each other, picture by picture."""
    found = []
    for start, group, place in _present(batch.groups, pictures):
        if place.see_each_other:
            first = start + place.position - group.position
            found.append((first, first + place.n_positions))
    return tuple(found)


def _positions(batch: MicroBatch, pictures: Sequence[Pictures], device: torch.device) -> Tensor:
    """Return the rotary positions [3, T] of all rows."""
    each = zip(batch.groups, pictures, strict=True)
    found = [
        torch.from_numpy(axis_positions(places, group.position, group.n_rows))
        for group, places in each
    ]
    return torch.cat(found, 1).to(device)


def axis_positions(places: Sequence[PicturePlace], first: int, n_rows: int) -> NDArray[np.int64]:
    """Return the positions [3, n_rows] by time, height and width of rows from position `first` on.

    Text counts by one on all axes. A picture begins behind the text before it and counts its rows
    on each axis; text goes on behind the largest of these positions. (transformers,
    Qwen2_5_VLModel.get_rope_index)
    """
    end = first + n_rows
    out = np.empty((3, n_rows), np.int64)
    begin = shift = 0  # of text: axis position = position + shift
    for place in places:
        _text(out, first, begin, min(place.position, end), shift)
        if place.position >= end:
            return out
        start = place.position + shift
        low, high = max(first, place.position), min(end, place.end)
        if low < high:
            inside = np.unravel_index(np.arange(low, high) - place.position, place.grid)
            out[:, low - first : high - first] = start + np.stack(inside)
        begin, shift = place.end, start + max(place.grid) - place.end
    _text(out, first, begin, end, shift)
    return out


def _text(out: NDArray[np.int64], first: int, begin: int, end: int, shift: int) -> None:
    """Write the positions of text at `[begin, end)` that is among the rows from `first` on."""
    low = max(first, begin)
    if low < end:
        out[:, low - first : end - first] = np.arange(low, end) + shift
