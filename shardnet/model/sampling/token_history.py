"""The token ids at each slot's positions, collected by the last stage from the rows it computes.

Like the KV cache it is overwritten by position, copied and trimmed with the slot, so that penalties
need no other state (design decision 2). Must not know sequences, sampling or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardnet.types import BLOCK_POSITIONS, SlotId, blocks_for

TokenArray = NDArray[np.int32]

_NOTHING: TokenArray = np.empty(0, np.int32)


class TokenHistory:
    """The token ids of all slots, 4 bytes a position. Positions never written hold 0."""

    def __init__(self) -> None:
        self._slots: dict[SlotId, TokenArray] = {}

    def write(self, slot: SlotId, position: int, token_ids: Sequence[int]) -> None:
        """Store the tokens of consecutive positions, the first at `position`."""
        end = position + len(token_ids)
        tokens = self._slots.get(slot, _NOTHING)
        if end > len(tokens):  # doubled, for amortized copies
            tokens = self._slots[slot] = _resized(tokens, max(end, 2 * len(tokens)))
        tokens[position:end] = token_ids

    def tokens(self, slot: SlotId, n_positions: int) -> TokenArray:
        """Return the tokens of the first `n_positions`, int32 [n_positions]: a view."""
        return self._slots.get(slot, _NOTHING)[:n_positions]

    def copy(self, source: SlotId, target: SlotId, n_positions: int) -> None:
        """Copy the first `n_positions` of `source` to `target`, replacing its contents."""
        self._slots[target] = _resized(self.tokens(source, n_positions), n_positions)

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Drop everything beyond the first `n_positions`. Unknown slots are ignored."""
        if n_positions == 0:
            self._slots.pop(slot, None)
        elif len(self._slots.get(slot, _NOTHING)) >= 2 * _room(n_positions):
            self._slots[slot] = _resized(self.tokens(slot, n_positions), n_positions)

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()


def _room(n_positions: int) -> int:
    return blocks_for(n_positions) * BLOCK_POSITIONS


def _resized(tokens: TokenArray, n_positions: int) -> TokenArray:
    new = np.zeros(_room(n_positions), np.int32)
    new[: len(tokens)] = tokens
    return new
