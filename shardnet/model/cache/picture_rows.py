"""What the rows of a step have of pictures, beside their token ids.

Knows shapes. Must not know towers, families or wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor


class PictureRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of pictures in a step of T rows, E hidden size.

    `index`, int64 [N], says which rows of the step they are, in ascending order. On the first stage
    `rows` [N, E] take the place of embedded token ids; elsewhere it is None. `deep` is added to
    what layers return (DeepStack), by absolute layer, [N, E] each. `blocks` are ranges [start, end)
    of rows of the step that see each other in both directions: all rows of a picture each.
    `positions`, int64 [3, T], are the rotary positions of all rows of the step, by time, height and
    width; None for those of the slot.
    """

    index: Tensor
    rows: Tensor | None = None
    deep: Mapping[int, Tensor] = {}
    blocks: tuple[tuple[int, int], ...] = ()
    positions: Tensor | None = None

    def take(self, rows: Sequence[int]) -> PictureRows:
        """Return what some rows of the step have, given in ascending order, whole blocks only."""
        places = {row: place for place, row in enumerate(rows)}
        index = self.index.tolist()
        kept = [number for number, row in enumerate(index) if row in places]
        return PictureRows(
            index=self.index.new_tensor([places[index[number]] for number in kept]),
            rows=None if self.rows is None else self.rows[kept],
            deep={layer: added[kept] for layer, added in self.deep.items()},
            blocks=tuple(
                (places[start], places[end - 1] + 1)
                for start, end in self.blocks
                if start in places
            ),
            positions=None if self.positions is None else self.positions[:, [*rows]],
        )

    def put(self, embedded: Tensor) -> Tensor:
        """Put the rows in the place of embedded token ids [T, E], once for each stream."""
        if self.rows is None:
            return embedded
        rows = self.rows.repeat(1, embedded.shape[1] // self.rows.shape[1])
        return embedded.index_copy(0, self.index, rows.to(embedded))

    def deepen(self, hidden: Tensor, layer: int) -> Tensor:
        """Add what DeepStack adds to the output [T, E] of an absolute layer."""
        added = self.deep.get(layer)
        return hidden if added is None else hidden.index_add(0, self.index, added.to(hidden))
