"""What a layer with a recurrence keeps of a slot: its state after the last position.

Knows shapes and memory. Must not know what is computed with them, nor scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardnet.model.config.model_config import StateShape
from shardnet.types import NOTED_STATES, is_noted


@dataclass(slots=True, kw_only=True)
class SlotState:
    """The state of one layer after the first `end` positions of a slot. Written in place.

    `recent` holds the last inputs of a convolution, the oldest first, `recurrent` a matrix for each
    head. Both are zeros before the first position. The only ways back are to before it, to the
    `earlier` states that were noted, those before each row that may be rejected, and to those that
    were `noted` on the way through a prompt.
    """

    recent: Tensor  # [positions, columns], compute dtype
    recurrent: Tensor  # [heads, columns of a key, columns of a value], float32
    end: int = 0
    earlier: list[SlotState] = field(default_factory=list)
    noted: tuple[SlotState, ...] = ()

    @classmethod
    def empty(cls, shape: StateShape, dtype: torch.dtype, device: torch.device) -> SlotState:
        """Make the state before the first position."""
        return cls(
            recent=torch.zeros(shape.recent, dtype=dtype, device=device),
            recurrent=torch.zeros(shape.recurrent, dtype=torch.float32, device=device),
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of the state."""
        return sum(part.numel() * part.element_size() for part in (self.recent, self.recurrent))

    def read(self, target: Tensor) -> None:
        """Copy the state to `target`, uint8 [n_bytes]."""
        for piece, held in self._pieces(target):
            piece.copy_(held)

    def write(self, source: Tensor) -> None:
        """Set the state, but for `end`, to what `read` has copied."""
        for piece, held in self._pieces(source):
            held.copy_(piece)

    def _pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # The larger part first: its elements are 4 bytes, and those of the other fewer.
        split = self.recurrent.numel() * self.recurrent.element_size()
        for part, held in ((flat[:split], self.recurrent), (flat[split:], self.recent)):
            yield part.view(held.dtype).view(held.shape), held

    def to(self, device: torch.device) -> SlotState:
        """Return the state on `device`: itself where it is there."""
        if self.recent.device == device:
            return self
        recent, recurrent = self.recent.to(device), self.recurrent.to(device)
        return SlotState(recent=recent, recurrent=recurrent, end=self.end)

    def note(self) -> None:
        """Note the state as it is now, to be rewound to."""
        self.earlier.append(self.clone())

    def note_before(self, n_rows: int) -> None:
        """Note the state before so many rows, if it is to be: see `is_noted`."""
        if is_noted(self.end, n_rows, [state.end for state in self.noted]):
            self.noted = (*self.noted[1 - NOTED_STATES :], self.clone())

    def at(self, n_positions: int) -> SlotState | None:
        """Return the state after `n_positions`, None if it is not known."""
        known = (state for state in (self, *self.earlier, *self.noted) if state.end == n_positions)
        return next(known, None)

    def rewind(self, n_positions: int) -> None:
        """Become the state after `n_positions`, if it is known, and forget those of drafts."""
        found = self.at(n_positions)
        if found is not None:
            self.recent, self.recurrent, self.end = found.recent, found.recurrent, found.end
        self.earlier.clear()
        self.noted = tuple(state for state in self.noted if state.end < n_positions)

    def clone(self) -> SlotState:
        """Copy the state, without what was noted, to memory of its own."""
        return SlotState(recent=self.recent.clone(), recurrent=self.recurrent.clone(), end=self.end)

    def reset(self) -> None:
        """Return to before the first position."""
        self.earlier.clear()
        self.noted = ()
        if self.end:
            self.recent.zero_()
            self.recurrent.zero_()
            self.end = 0
