"""States of layers with a recurrence on a device: cells there, and tensors of the host.

Rows that may be rejected have their inputs in cells, too, to compute states again.

A step writes states to cells of their own, so that what was noted before it stays where it is: a
copy of a state is a second holder of its cell. Whoever reads the tensors of a state has it brought
to the host. Must not know layers, nor what is computed with states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import StateShape
from shardnet.model.drivers.driver import Array, Buffer, Driver
from shardnet.types import DType

NO_CELL = 0xFFFFFFFF
"""In the place of a cell: the state is zeros."""


INPUT_ROWS: Final = 8
"""Rows whose inputs are in one cell."""


class StateLayer(Protocol):
    """What computes states of a layer on a device."""

    row_bytes: int
    """Of a row's inputs that are kept."""

    def replay(
        self, index: int, inputs: Sequence[Cell], n_rows: int, before: int, after: int
    ) -> None:
        """Compute a state of layer `index` again, over so many rows whose inputs are in cells.

        It is in the cell `before`, and put to the cell `after`.
        """


class Cells:
    """Places for what slots keep on a device. One has that of all layers."""

    def __init__(self, driver: Driver, sizes: Mapping[int, int]) -> None:
        """Make none yet; `sizes` are the bytes of each layer that keeps something."""
        self.driver = driver
        self.sizes = sizes
        self.buffers: dict[int, Buffer] = {}
        """Of each layer: [cells, its bytes]; valid until the next `take`."""
        self.n = 0
        """Cells that were made: with the same number they are where they were."""
        self.free: list[int] = []

    def take(self) -> Cell:
        """Take a free cell, whose contents are undefined. Raises CapacityError."""
        if not self.free:
            before, n = self.n, self.n + self.n // 2 + 4
            larger = {layer: self.driver.empty(n * size) for layer, size in self.sizes.items()}
            for layer, old in self.buffers.items():
                if self.sizes[layer]:
                    self.driver.copy(old, larger[layer], before * self.sizes[layer])
            self.buffers, self.n = larger, n
            self.free += range(n - 1, before - 1, -1)
        return Cell(self)


class Cell:
    """A place that is free again when nobody holds it."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.number = cells.free.pop()
        self.last_ids: Tensor | None = None
        """Token ids of the last positions, if n-grams need them and they were noted."""

    def __del__(self) -> None:
        self._cells.free.append(self.number)

    def upload(self, layer: int, state: Array) -> None:
        """Copy the state of a layer to the device: float32, or its bytes."""
        if state.nbytes:
            cells = self._cells
            cells.driver.upload(cells.buffers[layer], state, self.number * state.nbytes)

    def download(self, layer: int, state: Array) -> None:
        """Copy the state of a layer from the device, or the last bytes of it."""
        if state.nbytes:
            cells = self._cells
            end = (self.number + 1) * cells.sizes[layer]
            cells.driver.download(cells.buffers[layer], state, end - state.nbytes)


class DeviceState(SlotState):
    """The state of one layer: in a `cell`, in the host's tensors, or zeros if in neither."""

    def __init__(self, on: StateDevice, layer: int, end: int = 0, cell: Cell | None = None) -> None:
        self._on, self._layer = on, layer
        self.end, self.cell = end, cell
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = None
        self.kept, self.inputs, self._spare = [], [], None
        self.again: dict[tuple[int, int], Cell] = {}
        """The cells to compute states to again, by the positions of the rows: the slot's."""

    @classmethod
    def of(cls, state: SlotState, on: StateDevice, layer: int) -> DeviceState:
        """Take over a state of the host."""
        made = cls(on, layer, state.end)
        if state.end:
            made._tensors = state.recent, state.recurrent, state.features
        made.kept, made.inputs = state.kept, state.inputs
        return made

    @property
    def recent(self) -> Tensor:
        """See SlotState: of the host, which may write there."""
        return self._host()[0]

    @recent.setter
    def recent(self, given: Tensor) -> None:
        self._tensors = given, *self._host()[1:]

    @property
    def recurrent(self) -> Tensor:
        """See SlotState: of the host, which may write there."""
        return self._host()[1]

    @recurrent.setter
    def recurrent(self, given: Tensor) -> None:
        recent, _, features = self._host()
        self._tensors = recent, given, features

    @property
    def features(self) -> Tensor:
        """See SlotState: of the host, which may write there."""
        return self._host()[2]

    @features.setter
    def features(self, given: Tensor) -> None:
        self._tensors = *self._host()[:2], given

    def last_features(self, n: int) -> Tensor:
        """See SlotState."""
        if self._tensors is not None:
            return super().last_features(n)
        rows = torch.zeros(n, self._on.shapes[self._layer].features[1])
        if self.cell is not None:
            self.cell.download(self._layer, rows.numpy())
        return rows

    def _host(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._tensors is None:
            cell, self.cell = self.cell, None
            made = self._empty()
            self._tensors = made.recent, made.recurrent, made.features
            if cell is not None:
                flat = torch.empty(self.n_bytes, dtype=torch.uint8)
                cell.download(self._layer, flat.numpy())
                self.write(flat)
        return self._tensors

    def _empty(self) -> SlotState:
        shape = self._on.shapes[self._layer]
        return SlotState.empty(shape, torch.float32, torch.device("cpu"))

    @property
    def is_zero(self) -> bool:
        """Whether it is in neither place."""
        return self.cell is None and self._tensors is None

    @property
    def n_bytes(self) -> int:
        """See SlotState."""
        return self._on.cells.sizes[self._layer]

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

    def _give(self) -> SlotState:
        given = DeviceState(self._on, self._layer, self.end, self.cell)
        given._tensors, self._tensors, self.cell = self._tensors, None, None
        return given

    @property
    def _memory(self) -> Tensor | None:
        return None

    def _take(self, other: SlotState) -> None:
        if isinstance(other, DeviceState):
            self.cell, self._tensors, self.end = other.cell, other._tensors, other.end
        else:
            self.cell, self.end = None, other.end
            self._tensors = other.recent, other.recurrent, other.features

    def clone(self) -> SlotState:
        """See SlotState: with the same cell."""
        own = self.at_end
        if not isinstance(own, DeviceState):
            return own.clone()
        made = DeviceState(self._on, self._layer, own.end, own.cell)
        if own._tensors is not None:
            recent, recurrent, features = (tensor.clone() for tensor in own._tensors)
            made._tensors = recent, recurrent, features
        return made

    def reset(self) -> None:
        """See SlotState."""
        self.kept.clear()
        self.inputs.clear()
        self.end, self.cell, self._tensors = 0, None, None

    def replay(
        self,
        inputs: Sequence[Cell],
        begin: int,
        source: SlotState,
        target: SlotState,
        n_rows: int,
    ) -> None:
        """Compute this layer's state again over rows from position `begin` on: see Replay."""
        before = source.cell if isinstance(source, DeviceState) else None
        is_zero = isinstance(source, DeviceState) and source.is_zero
        if before is None and not is_zero:
            before = self._on.cells.take()
            flat = torch.empty(self.n_bytes, dtype=torch.uint8)
            source.read(flat)
            before.upload(self._layer, flat.numpy())
        key = begin, n_rows
        cell = self.again[key] = self.again.get(key) or self._on.cells.take()
        first = NO_CELL if before is None else before.number
        layer = self._on.layers[self._layer]
        layer.replay(self._layer, inputs, n_rows, first, cell.number)
        if isinstance(target, DeviceState):
            target.cell, target._tensors = cell, None
        else:
            flat = torch.empty(self.n_bytes, dtype=torch.uint8)
            cell.download(self._layer, flat.numpy())
            target.write(flat)


class StateDevice:
    """Where states are on a device: their `cells`, and those of the `inputs` of rows."""

    def __init__(
        self,
        driver: Driver,
        shapes: Mapping[int, StateShape],
        layers: Mapping[int, StateLayer],
    ) -> None:
        """Take the shapes of states by layer, and what computes those that have numbers."""
        self.shapes, self.layers = shapes, layers
        sizes = {layer: shape.size_bytes(DType.FLOAT32) for layer, shape in shapes.items()}
        self.cells = Cells(driver, sizes)
        sizes = {index: INPUT_ROWS * layer.row_bytes for index, layer in layers.items()}
        self.inputs = Cells(driver, sizes)


def cell_of(states: Sequence[SlotState], on: StateDevice) -> Cell | None:
    """Return the cell with the states of all layers of a slot, None where all are zeros.

    States that are elsewhere are uploaded. Raises CapacityError.
    """
    held = [state for state in states if state.n_bytes] or states
    own = [state for state in held if isinstance(state, DeviceState)]
    if len(own) == len(held):
        cell = own[0].cell
        if all(state.is_zero for state in own):
            return None
        if cell is not None and all(state.cell is cell for state in own):
            return cell
    cell = on.cells.take()
    for layer, state in zip(on.shapes, states, strict=True):
        flat = torch.empty(on.cells.sizes[layer], dtype=torch.uint8)
        state.read(flat)
        cell.upload(layer, flat.numpy())
    return cell


def advance(
    states: Sequence[DeviceState], on: StateDevice, rows: tuple[int, int], n_drafts: int
) -> tuple[Array, Cell | None]:
    """Let the states of a slot be those after the positions `rows`, a half-open range.

    The last `n_drafts` positions up to their end may be rejected: see SlotState.keep_before.
    Returns for each row the cell of the state before them all, that which the step writes, and
    where its inputs are to be kept, NO_CELL for nowhere: uint32 [rows, 3]; and the first of these
    cells, which is to be held until the step is launched. Raises CapacityError.
    """
    begin, end = rows
    n_rows = end - begin
    sources = [state.keep_before(n_rows, n_drafts) for state in states]
    before = cell_of(sources, on)
    for source in sources:
        if isinstance(source, DeviceState):
            source.cell, source._tensors = before, None
    cell = on.cells.take()
    found = np.full((n_rows, 3), NO_CELL, np.uint32)
    found[:, :2] = NO_CELL if before is None else before.number, cell.number
    inputs = []
    if states[0].kept:
        inputs = [on.inputs.take() for _ in range(-(-n_rows // INPUT_ROWS))]
        places = np.array([kept.number * INPUT_ROWS for kept in inputs], np.uint32)
        found[:, 2] = (places[:, None] + np.arange(INPUT_ROWS, dtype=np.uint32)).flat[:n_rows]
    again: dict[tuple[int, int], Cell] = {}
    for state in states:
        state.cell, state._tensors, state.again = cell, None, again
        if not inputs:
            state.count(n_rows)
        elif state._layer in on.layers:
            state.count(n_rows, partial(state.replay, inputs, begin))
        else:
            state.count(n_rows, _count_alone)
    return found, before


def _count_alone(source: SlotState, target: SlotState, n_rows: int) -> None:
    """Compute a state without numbers again."""
