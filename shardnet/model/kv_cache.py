"""The KV cache of one stage: slots that grow and shrink in blocks of 256 positions.

Knows room and memory. Must not know sequences or attention. The head books the room; here it is
only checked: `blocks_used + blocks_free == room_blocks` at all times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.device_memory import is_out_of_memory
from shardnet.types import BLOCK_POSITIONS, SlotId, blocks_for


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Keys and values of one slot, layer by layer: [KV heads, capacity, D] each."""

    blocks: int = 0
    keys: list[Tensor]
    values: list[Tensor]


class KvCache:
    """Slots of keys and values. One slot's layer is contiguous, so that attention gathers nothing.

    Layers are counted from 0 within the stage. A slot that was never grown holds nothing.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        room_blocks: int,
    ) -> None:
        self._n_layers = n_layers
        self._n_kv_heads = n_kv_heads
        self._head_size = head_size
        self._dtype = dtype
        self._device = device
        self._room_blocks = room_blocks
        self._slots: dict[SlotId, _Slot] = {}
        self._blocks_used = 0

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
        return self._device

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
        """Bytes of one block over all layers, keys and values."""
        position = 2 * self._n_kv_heads * self._head_size * self._dtype.itemsize
        return self._n_layers * position * BLOCK_POSITIONS

    def ensure(self, slot: SlotId, n_positions: int) -> None:
        """Give the slot room for positions `[0, n_positions)`; what it holds stays.

        Raises CapacityError, and changes nothing, when the room or the machine's memory is used up.
        """
        wanted = blocks_for(n_positions)
        held = self._slots[slot].blocks if slot in self._slots else 0
        if wanted <= held:
            return
        if wanted - held > self.blocks_free:
            raise CapacityError(
                f"slot {slot} needs {wanted - held} more KV blocks for {n_positions} positions, "
                f"{self.blocks_free} of {self._room_blocks} are free; "
                "give the node more --memory or ask for a shorter --context"
            )
        self._resize(slot, wanted)

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Give back the blocks beyond positions `[0, n_positions)`. Unknown slots are ignored."""
        if slot not in self._slots:
            return
        wanted = blocks_for(n_positions)
        if wanted == 0:
            self.free(slot)
        elif wanted < self._slots[slot].blocks:
            self._resize(slot, wanted)

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
        self.free(target)
        self.ensure(target, n_positions)
        held, new = self._slots[source], self._slots[target]
        for old, copied in zip(held.keys + held.values, new.keys + new.values, strict=True):
            copied[:, :n_positions] = old[:, :n_positions]

    def clear(self) -> None:
        """Give back all blocks of all slots."""
        self._slots.clear()
        self._blocks_used = 0

    def layer(self, slot: SlotId, layer: int) -> tuple[Tensor, Tensor]:
        """Return the slot's keys and values in a layer: [KV heads, capacity, D] each, writable."""
        held = self._slots[slot]
        return held.keys[layer], held.values[layer]

    def _resize(self, slot: SlotId, blocks: int) -> None:
        """Move the slot to tensors of `blocks` blocks, one at a time: the old one is freed first.

        Where memory runs out on the way, what has moved stays moved, which wastes room but no data.
        """
        held = self._slots.get(slot)
        if held is None:
            nothing = [self._empty(0)] * self._n_layers
            held = _Slot(keys=nothing, values=list(nothing))
        try:
            for tensors in (held.keys, held.values):
                for layer in range(self._n_layers):
                    tensors[layer] = self._moved(tensors[layer], blocks)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"slot {slot}: {self._device} has no memory for {blocks} KV blocks of "
                f"{self.block_bytes} bytes; start the node with less --memory"
            ) from error
        self._blocks_used += blocks - held.blocks
        held.blocks = blocks
        self._slots[slot] = held

    def _moved(self, old: Tensor, blocks: int) -> Tensor:
        new = self._empty(blocks)
        kept = min(old.shape[1], new.shape[1])
        new[:, :kept] = old[:, :kept]
        return new

    def _empty(self, blocks: int) -> Tensor:
        shape = (self._n_kv_heads, blocks * BLOCK_POSITIONS, self._head_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)  # [KV heads, capacity, D]
