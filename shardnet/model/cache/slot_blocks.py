"""The keys and values of one slot apart from its cache, and their rows as plain bytes.

Knows tensors, layers and blocks of 256 positions. Must not know files, links, sequences or room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardnet.model.cache.slot_state import SlotState
from shardnet.types import BLOCK_POSITIONS


def first_block(n_blocks: int, window: int | None) -> int:
    """Return the first block that the row behind `n_blocks` blocks attends to in a layer."""
    if window is None:
        return 0
    return max(0, n_blocks * BLOCK_POSITIONS - window + 1) // BLOCK_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """Stored keys and values of a slot, layer by layer: [KV heads, positions, W] each.

    The first row of layer `n` is position `firsts[n]`, a whole number of blocks. Layers that keep a
    state have it in `states`, and no rows.
    """

    keys: list[Tensor]
    values: list[Tensor]
    firsts: list[int]
    states: dict[int, SlotState] = field(default_factory=dict)

    def row_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes of one position in `layers`."""
        return sum(
            tensor.shape[0] * tensor.shape[2] * tensor.element_size()
            for tensor, _ in self._tensors(layers)
        )

    def block_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes of one block in `layers`."""
        return self.row_bytes(layers) * BLOCK_POSITIONS

    def read_rows(self, layers: Sequence[int], begin: int, end: int, target: Tensor) -> None:
        """Copy positions `[begin, end)` in `layers` to `target`, uint8.

        Layer by layer, keys before values, head by head.
        """
        for piece, held in self._pieces(layers, begin, end, target):
            piece.copy_(held)

    def write_rows(self, layers: Sequence[int], begin: int, end: int, source: Tensor) -> None:
        """Set positions `[begin, end)` in `layers` to what `read_rows` has copied."""
        for piece, held in self._pieces(layers, begin, end, source):
            held.copy_(piece)

    def read_block(self, layers: Sequence[int], block: int, target: Tensor) -> None:
        """Copy a block in `layers` to `target`, uint8 [block_bytes]."""
        self.read_rows(layers, block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS, target)

    def write_block(self, layers: Sequence[int], block: int, source: Tensor) -> None:
        """Set a block in `layers` to what `read_block` has copied."""
        self.write_rows(layers, block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS, source)

    def _pieces(
        self, layers: Sequence[int], begin: int, end: int, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of `flat` with the rows that they hold: [KV heads, rows, W] each."""
        offset = 0
        for tensor, first in self._tensors(layers):
            held = tensor[:, begin - first : end - first]
            n_bytes = held.numel() * held.element_size()
            yield flat[offset : offset + n_bytes].view(tensor.dtype).view(held.shape), held
            offset += n_bytes

    def _tensors(self, layers: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                if tensor.shape[2]:
                    yield tensor, self.firsts[layer]
