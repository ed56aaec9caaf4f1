"""What sequences hold on several ranges of layers of one node, moved as if they were one stage.

Knows which part has which layer. Must not know how rows are stored (slot_moves.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.stage.moves.slot_moves import SlotMoves
from shardnet.types import HeldRows, SequenceId, SlotId


class JoinedMoves(SlotMoves):
    """Gives away and takes in for `parts`, in the order of their layers."""

    def __init__(self, parts: Sequence[SlotMoves]) -> None:
        self._parts = tuple(parts)

    @property
    def form(self) -> str:
        """See SlotMoves: parts of unlike rows match no other stage."""
        return " ".join(dict.fromkeys(part.form for part in self._parts))

    @property
    def block_bytes(self) -> int:
        """See SlotMoves."""
        return sum(part.block_bytes for part in self._parts)

    def has_layer(self, layer: int) -> bool:
        """See SlotMoves."""
        return any(part.has_layer(layer) for part in self._parts)

    def held(
        self, sequence_id: SequenceId, slot: SlotId, layer: int, begin: int, end: int
    ) -> HeldRows:
        """See SlotMoves."""
        return self.part_of(layer).held(sequence_id, slot, layer, begin, end)

    def read(
        self, sequence_id: SequenceId, slot: SlotId, layer: int, begin: int, end: int
    ) -> memoryview:
        """See SlotMoves."""
        return self.part_of(layer).read(sequence_id, slot, layer, begin, end)

    def begin(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """See SlotMoves."""
        for part in self._parts:
            part.begin(sequence_id, token_ids)

    def next_wanted(self, sequence_id: SequenceId, layer: int) -> int:
        """See SlotMoves."""
        return self.part_of(layer).next_wanted(sequence_id, layer)

    def expect(self, sequence_id: SequenceId, layer: int, held: HeldRows, end: int) -> None:
        """See SlotMoves."""
        self.part_of(layer).expect(sequence_id, layer, held, end)

    def write(
        self, sequence_id: SequenceId, layer: int, begin: int, end: int, data: bytearray
    ) -> None:
        """See SlotMoves."""
        self.part_of(layer).write(sequence_id, layer, begin, end, data)

    def came(self, sequence_id: SequenceId, layer: int, end: int) -> None:
        """See SlotMoves."""
        self.part_of(layer).came(sequence_id, layer, end)

    def take_own(
        self, sequence_id: SequenceId, other: SlotMoves, slot: SlotId, layer: int, end: int
    ) -> None:
        """See SlotMoves."""
        self.part_of(layer).take_own(sequence_id, other, slot, layer, end)

    def is_whole(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """See SlotMoves."""
        return all(part.is_whole(sequence_id, n_positions) for part in self._parts)

    def has(self, sequence_id: SequenceId) -> bool:
        """See SlotMoves."""
        return any(part.has(sequence_id) for part in self._parts)

    def adopt(self, sequence_id: SequenceId, slot: SlotId, n_positions: int) -> Sequence[int]:
        """See SlotMoves."""
        *_, token_ids = [part.adopt(sequence_id, slot, n_positions) for part in self._parts]
        return token_ids

    def forget(self, sequence_id: SequenceId | None = None) -> None:
        """See SlotMoves."""
        for part in self._parts:
            part.forget(sequence_id)

    def part_of(self, layer: int) -> SlotMoves:
        """See SlotMoves; the first part refuses a layer that none has."""
        having = [part for part in self._parts if part.has_layer(layer)]
        return (having or self._parts)[0].part_of(layer)
