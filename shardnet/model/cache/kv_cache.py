"""The KV cache of one stage: slots that grow and shrink in blocks of 256 positions.

Knows capacity and memory. Must not know sequences or attention. The head reserves blocks; here they
are only checked: `blocks_used + blocks_free == room_blocks` at all times.

A layer with a sliding window keeps only the positions that later rows can attend to: its window,
and before it the rows of the largest frame, which may have to be written again. Earlier positions
are dropped as the slot grows, so such a slot can be rewound by at most `REWIND_ROWS` rows.

A layer with a recurrence keeps no positions but its state after the last one (slot_blocks.py), of a
fixed size: such a slot cannot be rewound but to its beginning, and to among drafts, over which the
state is computed again from one before them.

What a position needs of these layers, states and the rows of windows before it, is copied where the
head says so, and kept apart from all slots: any slot goes on from there.

A slot that is copied shares whole blocks with its source, where the compiled library computes: it
finds rows block by block. Such blocks lie apart and nobody writes to them. A slot that is rewound
into one gets a copy of it.

Rows are stored in the compute dtype, or quantised one by one (cache/kv_quantization.py): rows are
quantised on write and dequantised on read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_quantization import dequantize_rows, quantize_rows
from shardnet.model.cache.slot_blocks import (
    BlockDigests,
    SharedBlock,
    SlotContents,
    SlotState,
    first_block,
)
from shardnet.model.config.model_config import HeadShape, StateShape
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import native_kernels
from shardnet.types import (
    BLOCK_POSITIONS,
    REWIND_ROWS,
    KvDType,
    SlotId,
    StateId,
    blocks_for,
    settled_blocks,
)

SlotAddresses = npt.NDArray[np.int64]
"""Addresses of a slot's own keys and values, their first position and capacity, and the address of
the layer's row in a table of shared blocks: [layers, 5]."""


Pool = Callable[[Tensor], Tensor]
"""Makes entries [n, D] of what a layer stores of their positions as values: [n x positions, W].

W are the columns of all heads, one behind the other."""


def missing_rows(what: str) -> CapacityError:
    """Make the error for rows that a slot lacks by now, and that prompts sent again bring back."""
    return CapacityError(what, remedy="send the request again")


@dataclass(slots=True, kw_only=True)
class _Entries:
    """What was made of `n_pooled` positions each: the first `n` of `rows` [capacity, D]."""

    n_pooled: int
    rows: Tensor
    n: int = 0

    def add(self, more: Tensor, capacity: int) -> None:
        """Put entries behind those that are here, in memory for `capacity` of them or as it is."""
        end = self.n + len(more)
        if end > len(self.rows):
            grown = self.rows.new_empty(capacity, more.shape[1])
            grown[: self.n] = self.rows[: self.n]
            self.rows = grown
        self.rows[self.n : end] = more
        self.n = end

    def cut(self, n_positions: int) -> None:
        """Forget those of positions behind the first ones."""
        self.n = min(self.n, n_positions // self.n_pooled)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Keys and values of one slot, layer by layer: [KV heads, capacity, W] each.

    `firsts` is the position of each layer's first row: a whole number of blocks, above 0 only where
    the layer has a window, or behind the `shared` blocks. The slot ends after `blocks` blocks in
    all layers. `addresses` is the same for the compiled library, and `table` the addresses of keys
    and values in shared blocks: [layers, shared blocks, 2]. Layers with `states` have no keys and
    values, but where these say so. `entries` are what was made of values: see KvCache.entries.
    """

    blocks: int = 0
    keys: list[Tensor]
    values: list[Tensor]
    firsts: list[int]
    addresses: SlotAddresses
    states: dict[int, SlotState]
    digests: BlockDigests = field(default_factory=BlockDigests)
    shared: tuple[SharedBlock, ...] = ()
    table: npt.NDArray[np.int64] | None = None
    entries: dict[int, _Entries] = field(default_factory=dict)

    @property
    def contents(self) -> SlotContents:
        """The tensors, not copies."""
        return SlotContents(
            keys=[*self.keys],
            values=[*self.values],
            firsts=[*self.firsts],
            states=dict(self.states),
            shared=self.shared,
        )

    def place(self, layer: int, keys: Tensor, values: Tensor, first: int) -> None:
        """Let the slot have these tensors in a layer, from position `first` on."""
        self.keys[layer], self.values[layer], self.firsts[layer] = keys, values, first
        self.addresses[layer, :4] = (keys.data_ptr(), values.data_ptr(), first, keys.shape[1])

    def share(self, blocks: int, shared: tuple[SharedBlock, ...]) -> None:
        """Let the slot have so many blocks, the first of them `shared`."""
        self.blocks = blocks
        if shared == self.shared:
            return
        self.shared, layers = shared, range(len(self.keys))
        pairs = [
            [(b.keys[layer].data_ptr(), b.values[layer].data_ptr()) for b in shared]
            for layer in layers
        ]
        self.table = np.array(pairs, np.int64)
        begin, stride = self.table.ctypes.data, self.table.strides[0]
        self.addresses[:, 4] = [begin + layer * stride if shared else 0 for layer in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What `n_positions` need of layers that cannot be rewound: states, or the rows of windows.

    Rows are keys and values [KV heads, positions, W], those that the row behind attends to.
    """

    n_positions: int
    states: dict[int, SlotState]
    windows: dict[int, tuple[Tensor, Tensor]]


class KvCache:
    """Slots of keys and values on `device`. A slot is contiguous per layer, but for shared blocks.

    Layers are counted from 0 within the stage. A slot that was never grown holds nothing.
    `windows` has the sliding window of each layer, in positions, the row itself included; None is
    no window, and an empty sequence is none for any layer. Keys have `head_size` columns, values
    `value_size` (None: as many; 0: values are columns of the keys). Rows are written and read in
    `dtype`, and stored in `kv_dtype`, W elements each: those that are not quantised in `held`, None
    for `dtype`. `room_blocks` is the capacity of all slots together, in blocks of 256 positions.
    `states` has the state of each layer that keeps one, None where it has keys and values alone; an
    empty sequence is None for all. `heads` are those of each layer where they are not alike; then
    no shard has a part of them.
    """

    is_cut = False
    """Whether other shards hold rows too: reading `contents` asks them."""

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        room_blocks: int,
        windows: Sequence[int | None] = (),
        value_size: int | None = None,
        kv_dtype: KvDType = KvDType.AUTO,
        states: Sequence[StateShape | None] = (),
        heads: Sequence[HeadShape] = (),
        held: torch.dtype | None = None,
    ) -> None:
        assert len(windows) in (0, n_layers)
        assert len(states) in (0, n_layers)
        assert len(heads) in (0, n_layers)
        self._states = {n: shape for n, shape in enumerate(states) if shape is not None}
        self._without_kv = {n for n, shape in self._states.items() if not shape.is_beside_kv}
        self.windows = tuple(windows) or (None,) * n_layers
        """The sliding window of each layer, None where it has none."""
        self._windowed = [n for n, window in enumerate(self.windows) if window is not None]
        self._n_layers = n_layers
        self.n_kv_heads = n_kv_heads
        """Heads of keys and values."""
        self.is_quantized = kv_dtype is KvDType.INT8
        """Whether rows are stored quantised."""
        self.dtype = dtype
        """Dtype in which rows are written and read."""
        self.stored_dtype = torch.int8 if self.is_quantized else held or dtype
        """Dtype of what is stored of rows: of numbers, or of codes."""
        usual = HeadShape(
            n_kv_heads=n_kv_heads,
            key_size=head_size,
            value_size=head_size if value_size is None else value_size,
        )
        self._value_columns = [own.value_size for own in heads or (usual,) * n_layers]
        self._heads = tuple(self._stored(own) for own in heads or (usual,) * n_layers)
        self._are_alike = not heads
        self.device = device
        """Device of the slots."""
        self.room_blocks = room_blocks
        """Capacity of all slots together, in blocks."""
        self._slots: dict[SlotId, _Slot] = {}
        self.blocks_used = 0
        """Blocks in use."""
        self._kept: dict[StateId, _Kept] = {}
        self._turn: Iterator[tuple[SlotId, int, int]] = iter(())
        self.before_write: Callable[[SlotId, int, Sequence[Tensor]], None] | None = None
        """Called before rows are written: slot, first position, and the slot's keys by layer."""

    def alike(self, room_blocks: int) -> KvCache:
        """Make an empty cache of the same form, with room for so many blocks."""
        made = copy.copy(self)
        made._slots, made.blocks_used, made.room_blocks = {}, 0, room_blocks
        made._kept = {}
        made.before_write, made._turn = None, iter(())
        return made

    @property
    def whole_kv_heads(self) -> int:
        """Heads of keys and values of all shards together, whose rows `contents` has."""
        return self.n_kv_heads

    def has_rows(self, layer: int) -> bool:
        """Say whether a layer has keys and values."""
        return layer not in self._without_kv

    def settled(self, layer: int, n_positions: int) -> int:
        """Return how many of a slot's positions are not written again by those behind them."""
        shape = self._states.get(layer)
        return n_positions - n_positions % (1 if shape is None else shape.n_spread)

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state, which cannot be rewound."""
        return bool(self._states)

    @property
    def shares(self) -> bool:
        """Whether a copied slot shares blocks with its source."""
        return self.device.type == "cpu" and native_kernels() is not None

    def form(self, layer: int) -> str:
        """What rows of a layer look like: caches of one model exchange them where it is equal."""
        stored, dtype = (str(each).rpartition(".")[2] for each in (self.stored_dtype, self.dtype))
        heads = self._heads[layer]
        n_heads = self._n_whole_heads(heads)
        return f"{stored} {n_heads}x{heads.key_size}+{heads.value_size} of {dtype}"

    @property
    def blocks_free(self) -> int:
        """Blocks not in use."""
        return self.room_blocks - self.blocks_used

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values: an upper bound with windows.

        Without the states, which each slot has once.
        """
        elements = sum(
            self._n_whole_heads(heads) * (heads.key_size + heads.value_size)
            for layer, heads in enumerate(self._heads)
            if layer not in self._without_kv
        )
        return elements * self.stored_dtype.itemsize * BLOCK_POSITIONS

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all layers that keep one."""
        return sum(
            shape.n_inputs * self.dtype.itemsize + 4 * math.prod(shape.recurrent)
            for shape in self._states.values()
        )

    def ensure(self, slot: SlotId, n_positions: int, n_rows: int = 1) -> None:
        """Grow the slot to positions `[0, n_positions)`; the last `n_rows` are to be written.

        Keeps every position that those rows and later ones can attend to. Where they are the slot's
        first ones, states are reset. Raises CapacityError, without any change, if blocks or the
        machine's memory run out, if the rows would attend to positions that a window has dropped,
        and if a state is not that before the first of the rows.
        """
        begin = n_positions - n_rows
        self._check_rewind(slot, begin)
        if begin:
            self._check_states(slot, begin)
            if slot in self._slots:
                self._rewind_states(slot, begin)
        found = self._slots.get(slot)
        if found is not None and found.shared and begin <= len(found.shared) * BLOCK_POSITIONS:
            self._own_from(slot, begin, found.blocks)
        wanted = blocks_for(n_positions)
        held = self._slots[slot].blocks if slot in self._slots else 0
        if wanted > held:
            self._check_room(slot, wanted - held, n_positions)
            self._resize(slot, wanted, n_positions - max(n_rows, REWIND_ROWS))
        for state in self._slots[slot].states.values() if n_positions and not begin else ():
            state.reset()
        if n_positions:
            self._slots[slot].digests.writes(begin, n_positions)
            for made in self._slots[slot].entries.values():
                made.cut(begin)
        if self.before_write is not None:
            # from the block's first on: an entry is written to all of its positions
            first = begin // BLOCK_POSITIONS * BLOCK_POSITIONS
            self.before_write(slot, first, self._slots[slot].keys)

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Free the blocks beyond positions `[0, n_positions)`. Unknown slots are ignored.

        Where no memory is left for smaller tensors, the slot keeps those that it has. States that
        cannot be rewound stay as they are: no row can follow them. A block that is shared and not
        whole any more is copied.
        """
        if slot not in self._slots:
            return
        with suppress(CapacityError):
            self._rewind_states(slot, n_positions)
        for state in self._slots[slot].states.values():
            state.keep_no_drafts()
        for made in self._slots[slot].entries.values():
            made.cut(n_positions)
        digests = self._slots[slot].digests
        if n_positions < digests.end:
            digests.writes(n_positions, n_positions)
        wanted = blocks_for(n_positions)
        if wanted == 0:
            self.free(slot)
            return
        with suppress(CapacityError):
            self._own_from(slot, n_positions, min(wanted, self._slots[slot].blocks))

    def free(self, slot: SlotId) -> None:
        """Free all blocks of the slot. Unknown slots are ignored."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._count(held, 0, ())

    def keep_state(self, slot: SlotId, n_positions: int, state: StateId) -> None:
        """Keep a copy of what a row behind the slot's first `n_positions` needs, as `state`.

        That is the states of layers, and the rows that their windows reach. Raises CapacityError
        where they are not here, or the machine's memory runs out.
        """
        if not self.holds(slot, n_positions):  # a step before has failed
            raise missing_rows(
                f"slot {slot} does not hold the {n_positions} positions whose state is to be kept"
            )
        with self._enough_memory(slot, "a copy of its states"):
            kept = self._states_after(slot, n_positions)
            contents = self._slots[slot].contents
            for layer in self._windowed if self.shares else ():
                rows = (layer, self._first_seen(layer, n_positions), n_positions)
                keys, values = contents.rows(*rows), contents.rows(*rows, values=True)
                kept.windows[layer] = keys.clone(), values.clone()
        self._kept[state] = kept

    def kept_contents(self, state: StateId, n_positions: int | None = None) -> SlotContents | None:
        """Return what was kept as `state`, for any thread: it is not written.

        None if nothing was, or it is not that of `n_positions`. Layers without a window have no
        rows. States on a device are copied.
        """
        kept, cpu = self._kept.get(state), torch.device("cpu")
        if kept is None or n_positions not in (None, kept.n_positions):
            return None
        rows = [kept.windows.get(n, self.new_rows(n, 0)) for n in range(self._n_layers)]
        return SlotContents(
            keys=[keys for keys, _ in rows],
            values=[values for _, values in rows],
            firsts=[
                self._first_seen(n, kept.n_positions) if n in kept.windows else 0
                for n in range(self._n_layers)
            ],
            states={layer: each.to(cpu) for layer, each in kept.states.items()},
        )

    def drop_states(self, states: Sequence[StateId]) -> None:
        """Give kept states back. Unknown ones are ignored."""
        for state in states:
            self._kept.pop(state, None)

    def rest(self, slot: SlotId) -> None:
        """Give the slot's own states back: it goes on from a kept one, if at all."""
        if slot in self._slots:
            self._slots[slot].states.update(self._new_states())

    def copy(
        self, source: SlotId, target: SlotId, n_positions: int, state: StateId | None = None
    ) -> None:
        """Let slot `target` hold the first `n_positions` of slot `source`, in place of its own.

        States and the rows of windows become what was kept as `state`, without one those of
        `source`. Whole blocks are shared where the cache `shares` them, up to where these rows
        begin. A slot copied to itself keeps them.

        Raises CapacityError, without any change, if `source` does not hold them, if a state is that
        of another position, or if blocks or the machine's memory run out.
        """
        if source not in self._slots or self._slots[source].blocks < blocks_for(n_positions):
            raise missing_rows(
                f"slot {source} does not hold the {n_positions} positions to copy from it"
            )
        with self._enough_memory(target, "a copy of states"):
            kept = self._states_after(source, n_positions, state)
        n_shared = settled_blocks(n_positions) if self.shares else 0
        for layer in kept.windows:
            n_shared = min(n_shared, self._first_seen(layer, n_positions) // BLOCK_POSITIONS)
        if source == target:
            self.trim(target, n_positions)
            if kept.windows:
                self._own_from(target, n_shared * BLOCK_POSITIONS + 1, blocks_for(n_positions))
            self._put(target, kept)
            return
        self.free(target)
        wanted = blocks_for(n_positions)
        if self.shares:
            self._share(source, n_shared)
        self._check_room(target, wanted - n_shared, n_positions)
        held = self._slots[source]
        self._resize(target, wanted, n_positions - REWIND_ROWS, held.shared[:n_shared], source)
        self._slots[target].digests = held.digests.cut(n_positions)
        self._put(target, kept)

    def _put(self, slot: SlotId, kept: _Kept) -> None:
        """Let the slot go on with these states, and the rows of windows in place of its own."""
        held = self._slots[slot]
        held.states.update(kept.states)
        with self._enough_memory(slot, "the rows of its windows"):
            for layer, (keys, values) in kept.windows.items():
                seen = self._first_seen(layer, kept.n_positions)
                first = seen // BLOCK_POSITIONS * BLOCK_POSITIONS
                n_rows = held.blocks * BLOCK_POSITIONS - first
                heads = self._heads[layer]
                places = (
                    self._empty(heads.n_kv_heads, n_rows, heads.key_size),
                    self._empty(heads.n_kv_heads, n_rows, heads.value_size),
                )
                for place, rows in zip(places, (keys, values), strict=True):
                    place[:, seen - first : seen - first + rows.shape[1]] = rows
                held.place(layer, *places, first)

    def contents(self, slot: SlotId) -> SlotContents:
        """Return the slot's keys, values and states: the tensors, not copies."""
        return self._slots[slot].contents

    def holds(self, slot: SlotId, n_positions: int) -> bool:
        """Say whether the slot has blocks for `n_positions`."""
        return blocks_for(n_positions) <= (self._slots[slot].blocks if slot in self._slots else 0)

    def new_contents(self, n_blocks: int) -> SlotContents:
        """Make room on the CPU for the first `n_blocks` blocks of a slot, to be adopted later.

        A layer with a window has the blocks that the row after them attends to. States are those
        before the first position.
        """
        end = n_blocks * BLOCK_POSITIONS
        windows = enumerate(self.windows)
        firsts = [
            end if n in self._without_kv else first_block(n_blocks, window) * BLOCK_POSITIONS
            for n, window in windows
        ]
        rows = [self.new_rows(layer, end - first) for layer, first in enumerate(firsts)]
        cpu = torch.device("cpu")
        return SlotContents(
            keys=[keys for keys, _ in rows],
            values=[values for _, values in rows],
            firsts=[0 if n in self._without_kv else first for n, first in enumerate(firsts)],
            states={
                layer: SlotState.empty(shape, self.dtype, cpu)
                for layer, shape in self._states.items()
            },
        )

    def new_rows(self, layer: int, n_positions: int) -> tuple[Tensor, Tensor]:
        """Make room on the CPU for keys and values of a layer. Raises CapacityError."""
        cpu, heads = torch.device("cpu"), self._heads[layer]
        n_heads = self._n_whole_heads(heads)
        with capacity_error_for(f"no memory for {n_positions} positions", remedy="send it again"):
            return (
                self._empty(n_heads, n_positions, heads.key_size, cpu),
                self._empty(n_heads, n_positions, heads.value_size, cpu),
            )

    def adopt(self, slot: SlotId, contents: SlotContents, n_blocks: int) -> None:
        """Let the slot hold `contents` of `n_blocks` blocks, in place of its own.

        Raises CapacityError, with the slot free, if blocks or the device's memory run out.
        """
        self.free(slot)
        self._check_room(slot, n_blocks, n_blocks * BLOCK_POSITIONS)
        held = self._new_slot()
        with self._enough_memory(slot, f"{n_blocks} KV blocks"):
            for layer in range(self._n_layers):
                first = contents.first(layer)
                rows = (layer, first, contents.end(layer))
                keys, values = contents.rows(*rows), contents.rows(*rows, values=True)
                held.place(layer, keys.to(self.device), values.to(self.device), first)
            held.states.update(
                (layer, state.to(self.device)) for layer, state in contents.states.items()
            )
        held.digests.end = n_blocks * BLOCK_POSITIONS  # a row behind a part of the last one says so
        self._count(held, n_blocks, ())
        self._slots[slot] = held

    def look(self) -> int:
        """Look at the next whole block of a layer: has it changed since it was written?

        Returns its bytes, 0 where there is none. Raises ChangedMemoryError.
        """
        for turn in (self._turn, self._blocks()):
            self._turn = turn
            for slot, layer, block in turn:
                held = self._slots[slot]
                begin, contents = block * BLOCK_POSITIONS, held.contents
                if begin >= contents.first(layer) and block < settled_blocks(held.digests.end):
                    rows = (layer, begin, begin + BLOCK_POSITIONS)
                    keys, values = contents.rows(*rows), contents.rows(*rows, values=True)
                    return held.digests.look(layer, block, keys, values)
        return 0

    def _blocks(self) -> Iterator[tuple[SlotId, int, int]]:
        """Go through slots, layers and blocks, as they are when their turn comes.

        It waits between two looks, and must keep no slot's memory meanwhile.
        """
        is_looked_at = self.device.type == "cpu"
        for slot in [*self._slots] if is_looked_at else ():
            for layer in range(self._n_layers):
                block = 0
                while slot in self._slots and block < self._slots[slot].blocks:
                    if layer not in self._without_kv:
                        yield slot, layer, block
                    block += 1

    def clear(self) -> None:
        """Free all slots."""
        self._slots.clear()
        self._kept.clear()
        self.blocks_used = 0

    def layer(self, slot: SlotId, layer: int) -> tuple[Tensor, Tensor]:
        """Return the slot's keys and values in a layer: [KV heads, capacity, W] each.

        Their first row is position `first(slot, layer)`. Pass what is read to `dequantize`. They
        are copies where blocks are shared.
        """
        held = self._slots[slot]
        if not held.shared:
            return held.keys[layer], held.values[layer]
        contents = held.contents
        rows = (layer, contents.first(layer), contents.end(layer))
        return contents.rows(*rows), contents.rows(*rows, values=True)

    def own(self, slot: SlotId, layer: int) -> tuple[tuple[Tensor, Tensor], int]:
        """Return the keys and values that are the slot's alone, writable, and their first position.

        All rows that `ensure` has made room for lie there. Write the results of `quantize`.
        """
        held = self._slots[slot]
        return (held.keys[layer], held.values[layer]), held.firsts[layer]

    def entries(self, slot: SlotId, layer: int, n: int, n_pooled: int, pool: Pool) -> Tensor:
        """Return the first `n` entries of a layer, made of `n_pooled` positions' values each.

        Those that are new come of `pool`, which gets values in `dtype`. Float [n, D].
        """
        held = self._slots[slot]
        made = held.entries.get(layer)
        if made is None:
            n_columns = self._heads[layer].n_kv_heads * self._value_columns[layer]
            empty = pool(torch.empty(0, n_columns, dtype=self.dtype, device=self.device))
            held.entries[layer] = made = _Entries(n_pooled=n_pooled, rows=empty)
        if n > made.n:
            stored = held.contents.rows(layer, made.n * n_pooled, n * n_pooled, values=True)
            with self._enough_memory(slot, "what positions are chosen by"):
                heads = self.dequantize(stored, self._value_columns[layer])
                more = pool(heads.transpose(0, 1).flatten(1))
                made.add(more, held.blocks * BLOCK_POSITIONS // n_pooled)
        return made.rows[:n]

    def value_columns(self, layer: int) -> int:
        """Return how many columns a layer's values have: those behind a head's own are others'."""
        return self._value_columns[layer]

    def state(self, slot: SlotId, layer: int) -> SlotState:
        """Return the slot's state in a layer that keeps one, writable."""
        return self._slots[slot].states[layer]

    def assume_end(self, slot: SlotId, n_positions: int) -> None:
        """Pass the slot's states off as those after `n_positions`: for benchmarks."""
        for state in self._slots[slot].states.values():
            state.end = n_positions

    def quantize(self, rows: Tensor) -> Tensor:
        """Convert rows [..., D] in `dtype` to their stored form [..., W], each row by itself."""
        return quantize_rows(rows) if self.is_quantized else rows.to(self.stored_dtype)

    def dequantize(self, stored: Tensor, width: int) -> Tensor:
        """Convert stored rows [..., W] to rows [..., D] of D = `width` columns, in `dtype`."""
        if self.is_quantized:
            return dequantize_rows(stored, width, self.dtype)
        return stored.to(self.dtype)

    def addresses(self, slot: SlotId) -> SlotAddresses:
        """Return the addresses of the slot's keys and values, updated in place as it grows."""
        return self._slots[slot].addresses

    def first(self, slot: SlotId, layer: int) -> int:
        """Return the first position that the slot still holds in a layer."""
        held = self._slots[slot]
        return held.contents.first(layer) if held.shared else held.firsts[layer]

    def _check_room(self, slot: SlotId, more: int, n_positions: int) -> None:
        """Raise CapacityError unless `more` blocks are free."""
        if more > self.blocks_free:
            raise CapacityError(
                f"slot {slot} needs {more} more KV blocks for {n_positions} positions, "
                f"but only {self.blocks_free} of {self.room_blocks} are free",
                remedy="give the node more --memory or ask for a shorter --context",
            )

    def _check_rewind(self, slot: SlotId, position: int) -> None:
        """Raise CapacityError if a row at `position` would attend to positions a window dropped."""
        held = self._slots.get(slot)
        if held is None:
            return
        for layer, window in enumerate(self.windows):
            first = held.firsts[layer] if window is not None else 0
            if first and held.shared:
                first = held.contents.first(layer)
            if first and window is not None and position - window + 1 < first:
                raise missing_rows(
                    f"slot {slot} holds positions from {first} on in layers with a window of "
                    f"{window}, but was rewound to {position}"
                )

    def _states_after(self, slot: SlotId, n_positions: int, state: StateId | None = None) -> _Kept:
        """Copy what was kept as `state`, without one the states of the slot after `n_positions`.

        Raises CapacityError where that is not here, or windows have dropped rows without it.
        """
        kept = None if state is None else self._kept.get(state)
        if state is not None and (kept is None or kept.n_positions != n_positions):
            raise missing_rows(
                f"the state {state} after {n_positions} positions is not here any more"
            )
        if kept is None or not kept.windows:
            self._check_rewind(slot, n_positions)
        if kept is not None:
            states = kept.states
        else:
            self._check_states(slot, n_positions)
            own = self._slots[slot].states.items()
            states = {layer: each.at(n_positions) or each for layer, each in own}
        return _Kept(
            n_positions=n_positions,
            states={layer: each.clone() for layer, each in states.items()},
            windows={} if kept is None else kept.windows,
        )

    def _first_seen(self, layer: int, n_positions: int) -> int:
        """Return the first row that the row behind these positions attends to."""
        window = self.windows[layer]
        assert window is not None
        return max(0, n_positions - window + 1)

    def _check_states(self, slot: SlotId, position: int) -> None:
        """Raise CapacityError unless each state of the slot can be that before `position`."""
        held = self._slots.get(slot)
        if not self._states or (held is None and position == 0):
            return
        ends = {0} if held is None else {state.end for state in held.states.values()}
        is_known = held is not None and all(state.knows(position) for state in held.states.values())
        if not is_known:
            raise missing_rows(
                f"slot {slot} holds the state after {max(ends)} positions, which cannot be "
                f"rewound, but rows from {position} on were to follow"
            )

    def _rewind_states(self, slot: SlotId, n_positions: int) -> None:
        held = self._slots.get(slot)
        for state in held.states.values() if held is not None else ():
            state.rewind(n_positions)

    def _enough_memory(self, slot: SlotId, what: str) -> AbstractContextManager[None]:
        return capacity_error_for(
            f"slot {slot}: {self.device} has no memory for {what}",
            remedy="start the node with less --memory",
        )

    def _resize(
        self,
        slot: SlotId,
        blocks: int,
        seen_from: int,
        shared: tuple[SharedBlock, ...] | None = None,
        source: SlotId | None = None,
    ) -> None:
        """Move the slot to tensors that end after `blocks` blocks, layer by layer.

        They begin behind the `shared` blocks, by default those that the slot has, and hold what
        `source` has of the positions, by default the slot itself. Rows from position `seen_from` on
        may still be written. If memory runs out halfway, moved layers stay moved unless what is
        shared changes: that wastes memory but loses no data.
        """
        held = self._slots.get(slot)
        with self._enough_memory(slot, f"{blocks} KV blocks of {self.block_bytes} bytes"):
            if held is None:
                held = self._new_slot()
            shared = held.shared if shared is None else shared
            given = held if source is None else self._slots[source]
            end = self._end(slot if source is None else source)
            moved: list[tuple[int, Tensor, Tensor, int]] = []
            is_alike = source is None and shared == held.shared
            for layer, window in enumerate(self.windows):
                if layer in self._without_kv:
                    continue
                old = given.contents
                first = max(old.first(layer), len(shared) * BLOCK_POSITIONS)
                if window is not None:
                    needed_from = max(0, seen_from - window + 1)
                    first = max(first, needed_from // BLOCK_POSITIONS * BLOCK_POSITIONS)
                keys = self._moved(old, layer, (first, end), blocks, values=False)
                values = self._moved(old, layer, (first, end), blocks, values=True)
                moved.append((layer, keys, values, first))
                if is_alike:
                    held.place(*moved.pop())
        for place in moved:
            held.place(*place)
        self._count(held, blocks, shared)
        self._slots[slot] = held

    def _count(self, held: _Slot, blocks: int, shared: tuple[SharedBlock, ...]) -> None:
        """Let a slot have so many blocks, the first of them `shared`. Each is counted once."""
        for block in shared:
            self.blocks_used += block.users == 0
            block.users += 1
        for block in held.shared:
            block.users -= 1
            self.blocks_used -= block.users == 0
        self.blocks_used += (blocks - len(shared)) - (held.blocks - len(held.shared))
        held.share(blocks, shared)

    def _share(self, slot: SlotId, n_blocks: int) -> None:
        """Move the first blocks of a slot to where others may have them too."""
        held = self._slots[slot]
        if n_blocks <= len(held.shared):
            return
        old, n_shared = held.contents, len(held.shared)
        with self._enough_memory(slot, f"{n_blocks - n_shared} blocks to share"):
            rows: list[list[list[Tensor]]] = [[[], []] for _ in range(n_shared, n_blocks)]
            for block, pair in enumerate(rows, start=n_shared):
                begin, end = block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS
                for layer in range(self._n_layers):
                    for values, made in enumerate(pair):
                        made.append(old.rows(layer, begin, end, values=bool(values)).clone())
        shared = [SharedBlock(keys=keys, values=values) for keys, values in rows]
        self._resize(slot, held.blocks, 0, (*held.shared, *shared))

    def _own_from(self, slot: SlotId, position: int, blocks: int) -> None:
        """Give the slot blocks of its own from `position` on, and an end after `blocks` blocks.

        Raises CapacityError, without any change, as `ensure`.
        """
        held = self._slots[slot]
        kept = held.shared[: settled_blocks(position)]
        if blocks == held.blocks and len(kept) == len(held.shared):
            return
        n_freed = [block.users for block in held.shared[len(kept) :]].count(1)
        more = (blocks - len(kept)) - (held.blocks - len(held.shared)) - n_freed
        self._check_room(slot, more, position)
        self._resize(slot, blocks, 0, kept)

    def _new_slot(self) -> _Slot:
        return _Slot(
            keys=[self._empty(heads.n_kv_heads, 0, heads.key_size) for heads in self._heads],
            values=[self._empty(heads.n_kv_heads, 0, heads.value_size) for heads in self._heads],
            firsts=[0] * self._n_layers,
            addresses=np.zeros((self._n_layers, 5), np.int64),
            states=self._new_states(),
        )

    def _new_states(self) -> dict[int, SlotState]:
        """Make the states before the first position: memory is taken when they are written."""
        return {
            layer: SlotState.empty(shape, self.dtype, self.device)
            for layer, shape in self._states.items()
        }

    def _end(self, slot: SlotId) -> int:
        """Return behind which position the slot's tensors hold nothing yet."""
        return self._slots[slot].blocks * BLOCK_POSITIONS if slot in self._slots else 0

    def _moved(
        self,
        old: SlotContents,
        layer: int,
        positions: tuple[int, int],
        blocks: int,
        *,
        values: bool,
    ) -> Tensor:
        """Copy the positions `[first, end)` to a new tensor that begins with the first."""
        first, end = positions
        n_heads, _, width = (old.values if values else old.keys)[layer].shape
        new = self._empty(n_heads, max(0, blocks * BLOCK_POSITIONS - first), width)
        for begin, rows in old.parts(layer, values=values):
            low = max(begin, first)
            high = min(begin + rows.shape[1], first + new.shape[1], end)
            if low < high:
                new[:, low - first : high - first] = rows[:, low - begin : high - begin]
        return new

    def _empty(
        self, n_heads: int, n_positions: int, width: int, device: torch.device | None = None
    ) -> Tensor:
        shape = (n_heads, n_positions, width)  # [KV heads, capacity, W]
        return torch.empty(shape, dtype=self.stored_dtype, device=device or self.device)

    def _n_whole_heads(self, heads: HeadShape) -> int:
        """Return the heads of a layer in all shards together."""
        return self.whole_kv_heads if self._are_alike else heads.n_kv_heads

    def _stored(self, heads: HeadShape) -> HeadShape:
        """Return heads with W, the elements that a key or value takes in a slot."""
        return HeadShape(
            n_kv_heads=heads.n_kv_heads,
            key_size=self._width(heads.key_size),
            value_size=self._width(heads.value_size),
        )

    def _width(self, size: int) -> int:
        """Return W, the elements of a stored key or value of `size` columns."""
        return quantize_rows(torch.empty(0, size)).shape[-1] if self.is_quantized else size
