"""States of layers with a recurrence on a device: cells there, and tensors of the host.

A step writes states to cells of their own, so that what was noted before it stays where it is: a
copy of a state is a second holder of its cell. Whoever reads the tensors of a state has it brought
to the host. Must not know layers, nor what is computed with states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import StateShape
from shardnet.model.devices.driver import Array, Buffer, Driver

NO_CELL = 0xFFFFFFFF
"""In the place of a cell: the state is zeros."""


class Cells:
    """Places for the states of slots on a device. One has those of all layers."""

    def __init__(self, driver: Driver, shapes: Mapping[int, StateShape]) -> None:
        """Make none yet; `shapes` are those of the layers that keep a state."""
        self.driver = driver
        self.shapes = shapes
        self.buffers: dict[int, Buffer] = {}
        """Of each layer: [cells, its state's bytes]; valid until the next `take`."""
        self.n = 0
        """Cells that were made: with the same number they are where they were."""
        self.free: list[int] = []

    def n_bytes(self, layer: int) -> int:
        """Return the bytes of a state of a layer: float32."""
        shape = self.shapes[layer]
        return 4 * (int(np.prod(shape.recurrent)) + int(np.prod(shape.recent)))

    def take(self) -> Cell:
        """Take a free cell, whose contents are undefined. Raises CapacityError."""
        if not self.free:
            before, n = self.n, self.n + self.n // 2 + 4
            larger = {layer: self.driver.empty(n * self.n_bytes(layer)) for layer in self.shapes}
            for layer, old in self.buffers.items():
                if self.n_bytes(layer):
                    self.driver.copy(old, larger[layer], before * self.n_bytes(layer))
            self.buffers, self.n = larger, n
            self.free += range(n - 1, before - 1, -1)
        return Cell(self)


class Cell:
    """A place that is free again when nobody holds it."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.number = cells.free.pop()

    def __del__(self) -> None:
        self._cells.free.append(self.number)

    def upload(self, layer: int, state: Array) -> None:
        """Copy the state of a layer to the device: float32, or its bytes."""
        if state.nbytes:
            cells = self._cells
            cells.driver.upload(cells.buffers[layer], state, self.number * state.nbytes)

    def download(self, layer: int, state: Array) -> None:
        """Copy the state of a layer from the device."""
        if state.nbytes:
            cells = self._cells
            cells.driver.download(cells.buffers[layer], state, self.number * state.nbytes)


class DeviceState(SlotState):
    """The state of one layer: in a `cell`, in the host's tensors, or zeros if in neither."""

    def __init__(self, cells: Cells, layer: int, end: int = 0, cell: Cell | None = None) -> None:
        self._cells, self._layer = cells, layer
        self.end, self.cell = end, cell
        self._tensors: tuple[Tensor, Tensor] | None = None
        self.earlier = []

    @classmethod
    def of(cls, state: SlotState, cells: Cells, layer: int) -> DeviceState:
        """Take over a state of the host."""
        made = cls(cells, layer, state.end)
        if state.end:
            made._tensors = state.recent, state.recurrent
        return made

    @property
    def recent(self) -> Tensor:
        """See SlotState: of the host, which may write there."""
        return self._host()[0]

    @recent.setter
    def recent(self, given: Tensor) -> None:
        self._tensors = given, self._host()[1]

    @property
    def recurrent(self) -> Tensor:
        """See SlotState: of the host, which may write there."""
        return self._host()[1]

    @recurrent.setter
    def recurrent(self, given: Tensor) -> None:
        self._tensors = self._host()[0], given

    def _host(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            cell, self.cell = self.cell, None
            made = self._empty()
            self._tensors = made.recent, made.recurrent
            if cell is not None:
                flat = torch.empty(self.n_bytes, dtype=torch.uint8)
                cell.download(self._layer, flat.numpy())
                self.write(flat)
        return self._tensors

    def _empty(self) -> SlotState:
        shape = self._cells.shapes[self._layer]
        return SlotState.empty(shape, torch.float32, torch.device("cpu"))

    @property
    def is_zero(self) -> bool:
        """Whether it is in neither place."""
        return self.cell is None and self._tensors is None

    @property
    def n_bytes(self) -> int:
        """See SlotState."""
        return self._cells.n_bytes(self._layer)

    def read(self, target: Tensor) -> None:
        """See SlotState."""
        if self.cell is not None:
            self.cell.download(self._layer, target.numpy())
        elif self._tensors is None:
            target.zero_()
        else:
            super().read(target)

    def to(self, device: torch.device) -> SlotState:
        """See SlotState: a copy."""
        made, flat = self._empty(), torch.empty(self.n_bytes, dtype=torch.uint8)
        self.read(flat)
        made.write(flat)
        made.end = self.end
        return made

    def rewind(self, n_positions: int) -> None:
        """See SlotState."""
        found = self.at(n_positions)
        if isinstance(found, DeviceState):
            self.cell, self._tensors, self.end = found.cell, found._tensors, found.end
        elif found is not None:
            self.cell, self._tensors, self.end = None, (found.recent, found.recurrent), found.end
        self.earlier.clear()

    def clone(self) -> SlotState:
        """See SlotState: with the same cell."""
        made = DeviceState(self._cells, self._layer, self.end, self.cell)
        if self._tensors is not None:
            made._tensors = self._tensors[0].clone(), self._tensors[1].clone()
        return made

    def reset(self) -> None:
        """See SlotState."""
        self.earlier.clear()
        self.end, self.cell, self._tensors = 0, None, None


def cell_of(states: Sequence[DeviceState], cells: Cells) -> Cell | None:
    """Return the cell with the states of all layers of a slot, None where all are zeros.

    States that are elsewhere are uploaded. Raises CapacityError.
    """
    if all(state.is_zero for state in states):
        return None
    cell = states[0].cell
    if cell is not None and all(state.cell is cell for state in states):
        return cell
    cell = cells.take()
    for state in states:
        flat = torch.empty(state.n_bytes, dtype=torch.uint8)
        state.read(flat)
        cell.upload(state._layer, flat.numpy())
    return cell


def advance(
    states: Sequence[DeviceState], cells: Cells, rows: tuple[int, int], n_drafts: int
) -> tuple[Array, Cell | None]:
    """Let the states of a slot be those after the positions `rows`, a half-open range.

    The `n_drafts` last rows may be rejected: the states before them are noted. Returns for each row
    the cell of the state before them all, and that which the step writes: uint32 [rows, 2]; and
    the first of these, which is to be held until the step is launched. Raises CapacityError.
    """
    begin, end = rows
    before = cell_of(states, cells)
    source = NO_CELL if before is None else before.number
    for state in states:
        state.cell, state._tensors = before, None
    found = np.full((end - begin, 2), source, np.uint32)
    at, stops = begin, [end - n_drafts, *range(end - n_drafts + 1, end + 1)]
    for stop in stops:
        if stop == at:
            continue
        cell = cells.take()
        found[at - begin : stop - begin, 1] = cell.number
        for state in states:
            if at >= end - n_drafts:
                state.note()  # a draft is rejected by going on from here
            state.cell, state.end = cell, stop
        at = stop
    return found, before
