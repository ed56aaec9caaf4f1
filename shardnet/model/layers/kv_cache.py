"""The KV cache of one stage: slots that grow and shrink in blocks of 256 positions.

Knows room and memory. Must not know sequences or attention. The head books the room; here it is
only checked: `blocks_used + blocks_free == room_blocks` at all times.

A layer with a window keeps of a slot what the next rows can see: its window, and before it the rows
of the largest frame, which may have to be written again. What lies further back is given up as the
slot grows, so such a slot can be rewound by that many rows and no more (`REWIND_ROWS`).

Rows are kept as the model computes, or rounded one by one (layers/kv_quantization.py): whoever
writes has them made `kept`, whoever reads has them `restored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.kernels.device_memory import memory_named
from shardnet.model.layers.kv_quantization import restore_rows, round_rows
from shardnet.types import BLOCK_POSITIONS, REWIND_ROWS, KvDType, SlotId, blocks_for

Places = npt.NDArray[np.int64]
"""Addresses of a slot's keys and values, first position and capacity: [layers, 4]."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Keys and values of one slot, layer by layer: [KV heads, capacity, W] each.

    `firsts` is the position of each layer's first row: a whole number of blocks, above 0 only where
    the layer has a window. The slot ends after `blocks` blocks in all layers. `places` says it to
    the compiled library: addresses of keys and values, first position, capacity.
    """

    blocks: int = 0
    keys: list[Tensor]
    values: list[Tensor]
    firsts: list[int]
    places: Places


class KvCache:
    """Slots of keys and values. One slot's layer is contiguous, so that attention gathers nothing.

    Layers are counted from 0 within the stage. A slot that was never grown holds nothing.
    `windows` are the positions that rows of each layer see, themselves included; None is all of
    them, and so is an empty sequence for all layers. Keys are `head_size` wide, values too unless
    `value_size` says otherwise: 0 where they are parts of the keys. They come and are read in
    `dtype`, and lie here as `kv_dtype` says, W elements each.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        room_blocks: int,
        windows: Sequence[int | None] = (),
        value_size: int | None = None,
        kv_dtype: KvDType = KvDType.AUTO,
    ) -> None:
        assert len(windows) in (0, n_layers)
        self._windows = tuple(windows) or (None,) * n_layers
        self._n_layers = n_layers
        self._n_kv_heads = n_kv_heads
        self._is_rounded = kv_dtype is KvDType.INT8
        self._dtype = dtype
        self._key_width = self._width(head_size)
        self._value_width = self._width(head_size if value_size is None else value_size)
        self._device = device
        self._room_blocks = room_blocks
        self._slots: dict[SlotId, _Slot] = {}
        self._blocks_used = 0

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """What rows come and are read in."""
        return self._dtype

    @property
    def is_rounded(self) -> bool:
        """Whether rows lie here otherwise than they come."""
        return self._is_rounded

    @property
    def room_blocks(self) -> int:
        """Blocks that all slots together may take."""
        return self._room_blocks

    @property
    def blocks_used(self) -> int:
        """Blocks that slots hold now."""
        return self._blocks_used

    @property
    def blocks_free(self) -> int:
        """Blocks that slots can still take."""
        return self._room_blocks - self._blocks_used

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values: the most that it takes."""
        elements = self._n_kv_heads * (self._key_width + self._value_width)
        position = elements * self._kept_dtype.itemsize
        return self._n_layers * position * BLOCK_POSITIONS

    def ensure(self, slot: SlotId, n_positions: int, n_rows: int = 1) -> None:
        """Give the slot room for positions `[0, n_positions)`, the last `n_rows` to be written.

        What it holds stays, as far as those rows and later ones can see it. Raises CapacityError,
        and changes nothing, when the room or the machine's memory is used up, and when the rows
        would see positions that a window has given up.
        """
        self._check_rewind(slot, n_positions - n_rows)
        wanted = blocks_for(n_positions)
        held = self._slots[slot].blocks if slot in self._slots else 0
        if wanted <= held:
            return
        self._check_room(slot, wanted - held, n_positions)
        self._resize(slot, wanted, n_positions - max(n_rows, REWIND_ROWS))

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Give back the blocks beyond positions `[0, n_positions)`. Unknown slots are ignored."""
        if slot not in self._slots:
            return
        wanted = blocks_for(n_positions)
        if wanted == 0:
            self.free(slot)
        elif wanted < self._slots[slot].blocks:
            self._resize(slot, wanted, 0)

    def free(self, slot: SlotId) -> None:
        """Give back all blocks of the slot. Unknown slots are ignored."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._blocks_used -= held.blocks

    def copy(self, source: SlotId, target: SlotId, n_positions: int) -> None:
        """Put the first `n_positions` of `source`, which it must hold, into the empty `target`.

        Raises CapacityError, and changes nothing, when the room or the machine's memory is used up.
        """
        if source not in self._slots or self._slots[source].blocks < blocks_for(n_positions):
            raise CapacityError(
                f"slot {source} does not hold the {n_positions} positions to copy from it; the "
                "request has to be sent again"
            )
        self._check_rewind(source, n_positions)
        self.free(target)
        wanted = blocks_for(n_positions)
        self._check_room(target, wanted, n_positions)
        held = self._slots[source]
        self._slots[target] = _Slot(
            keys=list(held.keys),
            values=list(held.values),
            firsts=list(held.firsts),
            places=held.places.copy(),
        )
        try:
            self._resize(target, wanted, n_positions - REWIND_ROWS)  # to tensors of its own
        except CapacityError:
            del self._slots[target]
            raise

    def clear(self) -> None:
        """Give back all blocks of all slots."""
        self._slots.clear()
        self._blocks_used = 0

    def layer(self, slot: SlotId, layer: int) -> tuple[Tensor, Tensor]:
        """Return the slot's keys and values in a layer: [KV heads, capacity, W] each, writable.

        Their first row is that of position `first(slot, layer)`. What is written there is what
        `kept` makes, and what is read there `restored` makes rows of.
        """
        held = self._slots[slot]
        return held.keys[layer], held.values[layer]

    def kept(self, rows: Tensor) -> Tensor:
        """Make of rows [..., D] what lies in the cache, [..., W]: each row is rounded by itself."""
        return round_rows(rows) if self._is_rounded else rows

    def restored(self, kept: Tensor, width: int) -> Tensor:
        """Make of what lies there, [..., W], rows of `width` columns: [..., D]."""
        return restore_rows(kept, width, self._dtype) if self._is_rounded else kept

    def places(self, slot: SlotId) -> Places:
        """Return where the slot's keys and values are, now and as it grows, layer by layer.

        Addresses of keys and values, the position `first` and the capacity: [layers, 4], int64.
        """
        return self._slots[slot].places

    def first(self, slot: SlotId, layer: int) -> int:
        """Return the position of the first row that the slot keeps in a layer."""
        return self._slots[slot].firsts[layer]

    def _check_room(self, slot: SlotId, more: int, n_positions: int) -> None:
        """Raise CapacityError where so many blocks are not free."""
        if more > self.blocks_free:
            raise CapacityError(
                f"slot {slot} needs {more} more KV blocks for {n_positions} positions, "
                f"{self.blocks_free} of {self._room_blocks} are free; "
                "give the node more --memory or ask for a shorter --context"
            )

    def _check_rewind(self, slot: SlotId, position: int) -> None:
        """Raise CapacityError where a row at `position` would see what a window has given up."""
        held = self._slots.get(slot)
        if held is None:
            return
        for first, window in zip(held.firsts, self._windows, strict=True):
            if first and window is not None and position - window + 1 < first:
                raise CapacityError(
                    f"slot {slot} keeps positions from {first} on in layers with a window of "
                    f"{window} and was rewound to {position}; the request has to be sent again"
                )

    def _resize(self, slot: SlotId, blocks: int, seen_from: int) -> None:
        """Move the slot to tensors that end after `blocks` blocks, layer by layer.

        Rows from position `seen_from` on may still be written. Where memory runs out on the way,
        what has moved stays moved, which wastes room but no data.
        """
        held = self._slots.get(slot)
        if held is None:
            held = _Slot(
                keys=[self._empty(0, self._key_width)] * self._n_layers,
                values=[self._empty(0, self._value_width)] * self._n_layers,
                firsts=[0] * self._n_layers,
                places=np.zeros((self._n_layers, 4), np.int64),
            )
        with memory_named(
            f"slot {slot}: {self._device} has no memory for {blocks} KV blocks of "
            f"{self.block_bytes} bytes; start the node with less --memory"
        ):
            for layer, window in enumerate(self._windows):
                old = held.firsts[layer]
                first = old
                if window is not None:
                    kept_from = max(0, seen_from - window + 1)
                    first = max(old, kept_from // BLOCK_POSITIONS * BLOCK_POSITIONS)
                keys = self._moved(held.keys[layer], old, first, blocks)
                values = self._moved(held.values[layer], old, first, blocks)
                held.keys[layer], held.values[layer], held.firsts[layer] = keys, values, first
                place = (keys.data_ptr(), values.data_ptr(), first, keys.shape[1])
                held.places[layer] = place
        self._blocks_used += blocks - held.blocks
        held.blocks = blocks
        self._slots[slot] = held

    def _moved(self, old: Tensor, old_first: int, first: int, blocks: int) -> Tensor:
        """Copy the positions from `first` on to a tensor that begins there."""
        new = self._empty(max(0, blocks * BLOCK_POSITIONS - first), old.shape[2])
        skipped = first - old_first
        kept = max(0, min(old.shape[1] - skipped, new.shape[1]))
        new[:, :kept] = old[:, skipped : skipped + kept]
        return new

    def _empty(self, n_positions: int, width: int) -> Tensor:
        shape = (self._n_kv_heads, n_positions, width)  # [KV heads, capacity, W]
        return torch.empty(shape, dtype=self._kept_dtype, device=self._device)

    @property
    def _kept_dtype(self) -> torch.dtype:
        return torch.int8 if self._is_rounded else self._dtype

    def _width(self, size: int) -> int:
        """Return W, the elements that a key or value of `size` columns takes."""
        return round_rows(torch.empty(0, size)).shape[-1] if self._is_rounded else size
