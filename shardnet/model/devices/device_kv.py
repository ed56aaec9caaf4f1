"""The KV cache of a stage on a device: pages there, and what the machine's own memory has of them.

Each position of a slot is in pages on the device, in the host's tensors, or in both: whoever needs
it brings it over; so it is with states (device_states.py). So whatever reads slots or gives them
their contents works as on a CPU: copies, moves, prefixes on disk. Must not know layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import torch

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache, Pool
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.model.devices.device_states import Cell, DeviceState, StateDevice, StateLayer, advance
from shardnet.model.drivers.driver import Array, Buffer, Driver
from shardnet.model.layers.attention import Span
from shardnet.types import BLOCK_POSITIONS, SlotId, StateId, blocks_for

PAGE: Final = BLOCK_POSITIONS
"""Positions of a page."""
_ONE: Final = 0x3F800000
"""The bits of 1.0, by which a row's queries grow."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """What a slot has: its pages, and the positions that are valid on either side, from the first.

    A window's earlier positions count as valid: nobody attends to them.
    """

    pages: list[int] = field(default_factory=list)
    n_device: int = 0
    n_host: int = 0


class DeviceKvCache(KvCache):
    """Slots whose keys and values a driver's kernels write and attend to.

    Only for slots of float32, all layers alike. `compute_on` says on which driver;
    without one it is a KvCache of the host.
    """

    _driver: Driver | None = None

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self._n_spread = max((shape.n_spread for shape in self._states.values()), default=1)
        self.pooled: dict[int, tuple[int, int, Pool]] = {}
        """Layers with entries of so many positions and columns, which pages have as these."""

    def compute_on(self, driver: Driver, layers: Mapping[int, StateLayer]) -> None:
        """Keep pages on a device from now on, and states: `layers` compute those with numbers."""
        self._driver = driver
        self._held: dict[SlotId, _Held] = {}
        self._free_pages: list[int] = []
        self._n_pages = self._n_moved = 0
        self._buffers: dict[int, tuple[Buffer, ...]] = {}
        """Keys and values of each layer: [pages, KV heads, PAGE, head size] each, values of size 0
        where they are columns of the keys; and entries, if any, [pages, entries, columns]. Where
        memory ran out some have more pages than others.
        """
        self.states_on = StateDevice(driver, self._states, layers)

    @property
    def shares(self) -> bool:
        """See KvCache: no pages are shared on a device."""
        return self._driver is None and super().shares

    @property
    def n_made(self) -> tuple[int, ...]:
        """Pages, moved layers and cells: with the same numbers all are where they were."""
        on = self.states_on
        return self._n_pages, self._n_moved, on.cells.n, on.inputs.n

    def pages_of(self, layer: int) -> tuple[Buffer, Buffer]:
        """Return the keys and values of a layer; valid until the next `bring`."""
        keys, values, *_ = self._buffers[layer]
        return keys, values

    def entries_of(self, layer: int) -> Buffer:
        """Return the entries of a layer; valid until the next `bring`."""
        return self._buffers[layer][2]

    def bring(self, spans: Sequence[Span]) -> tuple[Array, Array, Array]:
        """Have the device hold all that comes before the rows of a step, which it then writes.

        Returns for each row its position, where its slot's pages begin and the bits of 1.0, uint32
        [T, 3], these pages' numbers, and where states of each row are, and its inputs are to be
        kept: `runs` and `places` of text/vectors.h, uint32 [T, 5].
        Raises CapacityError if the device has no memory left.
        """
        places: list[tuple[int, int, int]] = []
        pages: list[int] = []
        runs = np.zeros((spans[-1].end, 5), np.uint32)
        sources: list[Cell | None] = []  # held, so that no slot writes what another one reads
        for span in spans:
            held = self._held.setdefault(span.slot, _Held())
            end = span.position + span.end - span.start
            self._grow(held, blocks_for(end))
            self._move(span.slot, held, held.n_device, span.position, self._up)
            held.n_device, held.n_host = end, min(held.n_host, self._settled(span.position))
            places += [(row, len(pages), _ONE) for row in range(span.position, end)]
            pages += held.pages
            runs[span.start : span.end, :2] = span.start, span.end
            states = self._device_states(span.slot)
            if states:
                rows = span.position, end
                part, before = advance(states, self.states_on, rows, span.n_drafts)
                runs[span.start : span.end, 2:] = part
                sources.append(before)
        return np.array(places, np.uint32), np.array(pages, np.uint32), runs

    def _device_states(self, slot: SlotId) -> list[DeviceState]:
        """Return the states of a slot, which the cache has made for the host at first."""
        states = self._slots[slot].states
        for layer, state in states.items():
            if not isinstance(state, DeviceState):
                states[layer] = DeviceState.of(state, self.states_on, layer)
        return [state for state in states.values() if isinstance(state, DeviceState)]

    def give_back(self, spans: Sequence[Span]) -> None:
        """Have the host hold all that comes before the rows of a step, which it then writes."""
        for span in spans:
            held = self._held.setdefault(span.slot, _Held()) if self._driver else _Held()
            self._move(span.slot, held, held.n_host, min(span.position, held.n_device), self._down)
            held.n_host = span.position + span.end - span.start
            held.n_device = min(held.n_device, self._settled(span.position))

    def _settled(self, position: int) -> int:
        """Return how many positions no row from `position` on writes: entries are of 2^n."""
        return position - position % self._n_spread

    def _end(self, slot: SlotId) -> int:
        """See KvCache: what a device alone holds is not copied here, and takes no memory here."""
        held = self._held.get(slot) if self._driver else None
        return super()._end(slot) if held is None else held.n_host

    def _pull(self, slot: SlotId) -> None:
        held = self._held.get(slot) if self._driver else None
        if held is not None and held.n_host < held.n_device:
            self._move(slot, held, held.n_host, held.n_device, self._down)
            held.n_host = held.n_device

    def contents(self, slot: SlotId) -> SlotContents:
        """See KvCache."""
        self._pull(slot)
        return super().contents(slot)

    def copy(
        self, source: SlotId, target: SlotId, n_positions: int, state: StateId | None = None
    ) -> None:
        """See KvCache: what is on the device is copied there."""
        super().copy(source, target, n_positions, state)
        if self._driver and source != target:
            held = self._held.get(source, _Held())
            made = self._held[target] = _Held(n_host=min(held.n_host, n_positions))
            try:
                self._copy_pages(held, made, min(held.n_device, n_positions))
            except CapacityError:
                self.free(target)
                raise

    def adopt(self, slot: SlotId, contents: SlotContents, n_blocks: int) -> None:
        """See KvCache."""
        super().adopt(slot, contents, n_blocks)
        if self._driver:
            self._forget(slot)
            self._held[slot] = _Held(n_host=n_blocks * PAGE)

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """See KvCache."""
        super().trim(slot, n_positions)
        held = self._held.get(slot) if self._driver else None
        if held is not None:
            held.n_host, held.n_device = (min(n, n_positions) for n in (held.n_host, held.n_device))
            n_pages = blocks_for(n_positions)
            self._free_pages += held.pages[n_pages:]
            del held.pages[n_pages:]

    def look(self) -> int:
        """See KvCache: at none whose rows are written elsewhere."""
        return 0 if self._driver else super().look()

    def free(self, slot: SlotId) -> None:
        """See KvCache."""
        super().free(slot)
        if self._driver:
            self._forget(slot)

    def clear(self) -> None:
        """See KvCache."""
        super().clear()
        for slot in [*self._held] if self._driver else []:
            self._forget(slot)

    def alike(self, room_blocks: int) -> Self:
        """See KvCache: one of the host alone."""
        made = super().alike(room_blocks)
        assert isinstance(made, type(self))
        made._driver = None
        return made

    def _forget(self, slot: SlotId) -> None:
        held = self._held.pop(slot, None)
        if held is not None:
            self._free_pages += held.pages

    def _grow(self, held: _Held, n_pages: int) -> None:
        """Give a slot pages up to so many. Raises CapacityError."""
        missing = n_pages - len(held.pages)
        if missing > len(self._free_pages):
            self._add_pages(missing - len(self._free_pages))
        held.pages += [self._free_pages.pop() for _ in range(missing)]

    def _add_pages(self, missing: int) -> None:
        """Move to twice as many pages, at most those of the room, or to as many as are needed.

        One layer after the other, so that no more than one takes memory twice. Raises
        CapacityError: layers that were moved until then stay where they are.
        """
        assert self._driver is not None
        before, driver = self._n_pages, self._driver
        n_pages = max(min(2 * before, self.room_blocks), before + missing)
        for layer in range(len(self._heads)):
            each = self._page_bytes(layer)
            made = tuple(driver.empty(n_pages * n_bytes) for n_bytes in each)
            for old, new, n_bytes in zip(self._buffers.get(layer, ()), made, each, strict=False):
                if before * n_bytes:
                    driver.copy(old, new, before * n_bytes)
            self._n_moved += 1
            self._buffers[layer] = made
        self._free_pages += range(n_pages - 1, before - 1, -1)
        self._n_pages = n_pages

    def _page_bytes(self, layer: int) -> tuple[int, ...]:
        """Return the bytes of a page of each of a layer's buffers."""
        if layer in self._without_kv:
            return 0, 0
        heads = self._heads[layer]
        each = 4 * heads.n_kv_heads * PAGE
        both = each * heads.key_size, each * heads.value_size
        if layer not in self.pooled:
            return both
        n_pooled, n_columns, _ = self.pooled[layer]
        return *both, 4 * PAGE // n_pooled * n_columns

    def _copy_pages(self, source: _Held, target: _Held, n_positions: int) -> None:
        """Copy the first positions of a slot to pages of another. Raises CapacityError."""
        assert self._driver is not None
        self._grow(target, blocks_for(n_positions))
        for layer, both in self._buffers.items():
            for buffer, n_bytes in zip(both, self._page_bytes(layer), strict=True):
                if n_bytes == 0:  # columns of the keys, or a layer without either
                    continue
                for page, other in zip(source.pages, target.pages, strict=False):
                    self._driver.copy(buffer, buffer, n_bytes, (page * n_bytes, other * n_bytes))
        target.n_device = n_positions

    def _move(
        self,
        slot: SlotId,
        held: _Held,
        begin: int,
        end: int,
        way: Callable[[Buffer, torch.Tensor, int], None],
    ) -> None:
        """Copy positions `[begin, end)` of all layers between pages and tensors."""
        for layer, heads in enumerate(self._heads) if begin < end else ():
            if layer in self._without_kv:
                continue
            first = self.first(slot, layer)
            if layer in self.pooled and way == self._up:
                self._bring_entries(slot, held, layer, begin, end)
            for stored, buffer in zip(self.layer(slot, layer), self.pages_of(layer), strict=True):
                at, size = max(begin, first), stored.shape[-1]
                if size == 0:  # columns of the keys
                    continue
                while at < end:
                    stop = min(end, (at // PAGE + 1) * PAGE)
                    page = held.pages[at // PAGE] * heads.n_kv_heads
                    for head in range(heads.n_kv_heads):
                        place = 4 * size * ((page + head) * PAGE + at % PAGE)
                        way(buffer, stored[head, at - first : stop - first], place)
                    at = stop

    def _bring_entries(self, slot: SlotId, held: _Held, layer: int, begin: int, end: int) -> None:
        """Upload the entries whose last positions are within `[begin, end)`."""
        n_pooled, _, pool = self.pooled[layer]
        entries = self.entries(slot, layer, end // n_pooled, n_pooled, pool)
        of_page, n_bytes = PAGE // n_pooled, 4 * entries.shape[1]
        at = begin // n_pooled
        while at < len(entries):
            stop = min(len(entries), (at // of_page + 1) * of_page)
            place = held.pages[at // of_page] * of_page + at % of_page
            self._up(self._buffers[layer][2], entries[at:stop], place * n_bytes)
            at = stop

    def _up(self, buffer: Buffer, rows: torch.Tensor, place: int) -> None:
        assert self._driver is not None
        self._driver.upload(buffer, rows.numpy(), place)

    def _down(self, buffer: Buffer, rows: torch.Tensor, place: int) -> None:
        assert self._driver is not None
        self._driver.download(buffer, rows.numpy(), place)
