"""The keys and values of one slot apart from its cache, and their blocks as plain bytes.

Knows tensors, layers and blocks of 256 positions. Must not know files, sequences or room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardnet.types import BLOCK_POSITIONS


def first_block(n_blocks: int, window: int | None) -> int:
    """Return the first block that the row behind `n_blocks` blocks attends to in a layer."""
    if window is None:
        return 0
    return max(0, n_blocks * BLOCK_POSITIONS - window + 1) // BLOCK_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """Stored keys and values of a slot, layer by layer: [KV heads, positions, W] each.

    The first row of layer `n` is position `firsts[n]`, a whole number of blocks.
    """

    keys: list[Tensor]
    values: list[Tensor]
    firsts: list[int]

    def block_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes of one block in `layers`."""
        return sum(
            tensor.shape[0] * BLOCK_POSITIONS * tensor.shape[2] * tensor.element_size()
            for tensor, _ in self._tensors(layers)
        )

    def read_block(self, layers: Sequence[int], block: int, target: Tensor) -> None:
        """Copy a block in `layers` to `target`, uint8 [block_bytes].

        Layer by layer, keys before values, head by head.
        """
        for piece, held in self._pieces(layers, block, target):
            piece.copy_(held)

    def write_block(self, layers: Sequence[int], block: int, source: Tensor) -> None:
        """Set a block in `layers` to what `read_block` has copied."""
        for piece, held in self._pieces(layers, block, source):
            held.copy_(piece)

    def _pieces(
        self, layers: Sequence[int], block: int, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of `flat` with the rows that they hold: [KV heads, 256, W] each."""
        offset = 0
        for tensor, first in self._tensors(layers):
            begin = block * BLOCK_POSITIONS - first
            held = tensor[:, begin : begin + BLOCK_POSITIONS]
            n_bytes = held.numel() * held.element_size()
            yield flat[offset : offset + n_bytes].view(tensor.dtype).view(held.shape), held
            offset += n_bytes

    def _tensors(self, layers: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                if tensor.shape[2]:
                    yield tensor, self.firsts[layer]
