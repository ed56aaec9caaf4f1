"""The keys, values and states of sequences on their way between the stages of two plans.

Knows layers by their number in the model, positions, and rows as plain bytes; several ranges of
layers of one node are moved as if they were one stage. Must not know links,
rings or which node has what.

What leaves is looked up on the compute thread, between two steps, for all layers at once. It is
copied on any thread where that may be: answered rows do not change any more, nor do kept states.

What arrives for a sequence lies apart, on the CPU, until the sequence opens its slot on the compute
thread. It is taken in on another one, maybe in several rounds while the sequence goes on elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardnet.errors import UsageError
from shardnet.model.cache.kv_cache import KvCache, missing_rows
from shardnet.model.cache.slot_blocks import SlotContents, SlotState
from shardnet.slot_operations import OpenSequence
from shardnet.types import (
    BLOCK_POSITIONS,
    HeldRows,
    LayerRange,
    SequenceId,
    SlotId,
    StateId,
    blocks_for,
)

MAX_ARRIVING: Final = 256
"""Sequences that may lie here and have not been opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayer:
    """What a slot holds of one layer: rows up to position `end`, and the `state` after them if any.

    Rows are those of layer `index` of `contents`, tensors that the slot may leave meanwhile. The
    state is a copy, or `is_kept` apart from the slot: then nobody writes to it. All of it may be
    read on any thread if it `is_free`. Who has the slot next may write to the same rows: what was
    read counts only if the sequence `owns` it still.
    """

    owns: Callable[[], bool]
    form: str
    contents: SlotContents
    index: int
    end: int
    has_rows: bool
    state: SlotState | None
    is_kept: bool
    is_free: bool

    def held(self, begin: int) -> HeldRows:
        """Say what there is from position `begin` on.

        Rows before `first` are gone where the layer has a window. A state comes with the rows
        beside it, if any.
        """
        first, n_bytes = begin, 0
        if self.has_rows:
            first = max(begin, self.contents.first(self.index))
            n_bytes = max(0, self.end - first) * self.contents.row_bytes([self.index])
        if self.state is None:
            return HeldRows(first=first, n_bytes=n_bytes)
        return HeldRows(first=first, n_bytes=self.state.n_bytes + n_bytes, is_state=True)

    def read(self, begin: int, end: int) -> memoryview:
        """Copy positions `[begin, end)` as plain bytes, behind all of the state if there is one.

        Raises UsageError if the sequence has left its slot.
        """
        n_state = 0 if self.state is None else self.state.n_bytes
        n_rows = (end - begin) * self.contents.row_bytes([self.index]) if self.has_rows else 0
        buffer = torch.empty(n_state + n_rows, dtype=torch.uint8)
        if self.state is not None:
            self.state.read(buffer[:n_state])
        if n_rows:
            # What follows a state need not be aligned there.
            rows = torch.empty(n_rows, dtype=torch.uint8) if n_state else buffer
            self.contents.read_rows([self.index], begin, end, rows)
            buffer[n_state:] = rows
        if not self.owns():
            raise UsageError("the sequence has left its slot meanwhile")
        return _bytes_of(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows of a layer at positions `[first, end)`, and the `state` after them if it keeps one."""

    first: int
    end: int
    state: SlotState | None = None


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """What has come for a sequence. `contents` has the rows, and room for a state that comes.

    Of layer `n` these are `pieces[n]`: the last one, and before it that of the last round in which
    all layers came to the `common_end`, as another may be cut off. What comes now of layer `n`
    begins at position `firsts[n]`.
    """

    contents: SlotContents
    n_blocks: int
    pieces: list[list[_Piece]]
    token_ids: Sequence[int]
    firsts: list[int]
    common_end: int = 0

    def begin_round(self) -> None:
        """Note what the rounds before have brought."""
        ends = {pieces[-1].end for pieces in self.pieces if pieces[-1].end}
        if len(ends) == 1:
            [self.common_end] = ends

    def came(self, index: int, end: int) -> None:
        """Note that a layer has come up to position `end`."""
        pieces, first = self.pieces[index], self.firsts[index]
        if pieces[-1].first <= first <= pieces[-1].end:
            first = pieces[-1].first
        state = self.contents.states.get(index)
        if state is not None:
            state = state.clone()
            state.end = end
        before = [piece for piece in pieces if 0 < piece.end == self.common_end]
        self.pieces[index] = [*before, _Piece(first=first, end=end, state=state)]

    def piece(self, index: int, n_positions: int, window: int | None) -> _Piece | None:
        """Return what the row behind so many positions needs of a layer, None if it has not come.

        Rows may go on behind them, a state may not.
        """
        for piece in self.pieces[index]:
            is_near = window is not None and piece.first <= n_positions - window + 1
            is_after = piece.end == n_positions or (piece.state is None and piece.end > n_positions)
            if is_after and (not piece.first or is_near):
                return piece
        return None


class SlotMoves:
    """Gives away what slots of `kv` hold, and takes in what other stages held of `layers`.

    `owners` are the sequences that own slots now: the stage keeps them. Of a stage that spans
    several nodes, these are the rows of `heads`, "" for all.
    """

    def __init__(
        self,
        kv: KvCache,
        layers: LayerRange,
        owners: Mapping[SlotId, OpenSequence],
        heads: str = "",
    ) -> None:
        self._kv = kv
        self._heads = heads
        self.layers = layers
        self.block_bytes = kv.block_bytes
        """Bytes of one block of positions over all layers: an upper bound with windows."""
        self.state_bytes = kv.state_bytes
        """Bytes of one state over all layers that keep one."""
        self._owners = owners
        self._arriving: dict[SequenceId, _Arriving] = {}
        self._lock = threading.Lock()
        """Held while something is taken in: the compute thread must not adopt it meanwhile."""

    def form(self, layer: int) -> str:
        """What the rows of a layer look like here; only equal ones can be taken in."""
        return self._kv.form(layer - self.layers.start) + self._heads

    def has_layer(self, layer: int) -> bool:
        """Say whether it moves a layer."""
        return self.layers.start <= layer < self.layers.end

    def part_of(self, layer: int) -> SlotMoves:
        """Return what moves a layer: itself, unless it is joined of several."""
        return self

    # --- what leaves

    def look(
        self, sequence_id: SequenceId, slot: SlotId, end: int, state: StateId | None = None
    ) -> dict[int, HeldLayer]:
        """Look up what a sequence has of its first `end` positions, by layer.

        States, and the rows of windows where these were kept, are those kept as `state`; without
        one those of the slot. Raises UsageError if the sequence does not own the slot, or these
        are not there.
        """
        owner = self._owners.get(slot)
        if owner is None or owner.sequence_id != sequence_id:
            raise UsageError(f"sequence {sequence_id} does not own slot {slot}")
        if not self._kv.holds(slot, max(1, end)):
            raise UsageError(
                f"{end} positions of sequence {sequence_id} were asked for, and slot {slot} does "
                "not hold them"
            )
        contents, kept = self._kv.contents(slot), None
        if state is not None and (kept := self._kv.kept_contents(state, end)) is None:
            raise UsageError(f"the state {state} after {end} positions is not kept here any more")
        is_free = self._kv.device.type == "cpu" and not self._kv.is_cut
        return {
            layer: HeldLayer(
                owns=lambda: self._owners.get(slot) is owner,
                form=self.form(layer),
                contents=kept if kept is not None and kept.keys[index].shape[1] else contents,
                index=index,
                end=end,
                has_rows=self._kv.has_rows(index),
                state=kept.states.get(index) if kept is not None else _state(contents, index, end),
                is_kept=kept is not None,
                is_free=is_free,
            )
            for index, layer in enumerate(self.layers)
        }

    # --- what arrives

    def begin(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Make room for the positions of `token_ids` of a sequence, beside what has come already.

        Raises CapacityError if there is none.
        """
        n_blocks = blocks_for(len(token_ids))
        with self._lock:
            others = [each for key, each in self._arriving.items() if key != sequence_id]
            wanted = n_blocks + sum(each.n_blocks for each in others)
            if len(others) >= MAX_ARRIVING or wanted > self._kv.room_blocks:
                raise missing_rows(
                    f"{len(others) + 1} sequences of {wanted} KV blocks were to be moved here, and "
                    f"there is room for {self._kv.room_blocks} blocks"
                )
            arriving = self._arriving.get(sequence_id)
            if arriving is None:
                arriving = _Arriving(
                    contents=self._kv.new_contents(0),
                    n_blocks=n_blocks,
                    pieces=[[_Piece(first=0, end=0)] for _ in self.layers],
                    token_ids=token_ids,
                    firsts=[0] * len(self.layers),
                )
                self._arriving[sequence_id] = arriving
            arriving.begin_round()
            arriving.n_blocks, arriving.token_ids = max(arriving.n_blocks, n_blocks), token_ids

    def _begun(self, sequence_id: SequenceId, layer: int) -> tuple[_Arriving, int]:
        """Return what comes for a sequence, and which of the layers here a layer is.

        Raises UsageError for one that did not `begin`, or was forgotten since.
        """
        arriving = self._arriving.get(sequence_id)
        if arriving is None:
            raise UsageError(
                f"what came for sequence {sequence_id} was dropped before all of it was here",
                remedy="let it be computed again",
            )
        return arriving, layer - self.layers.start

    def next_wanted(self, sequence_id: SequenceId, layer: int) -> int:
        """Return the first position of a layer that has not come yet."""
        arriving, index = self._begun(sequence_id, layer)
        return self._kv.settled(index, arriving.pieces[index][-1].end)

    def expect(self, sequence_id: SequenceId, layer: int, held: HeldRows, end: int) -> None:
        """Make room for what a source holds of a layer up to position `end`.

        Raises UsageError if it cannot be what this stage would hold, CapacityError without memory.
        """
        with self._lock:
            arriving, index = self._begun(sequence_id, layer)
            contents, first = arriving.contents, held.first
            has_come = self._kv.settled(index, arriving.pieces[index][-1].end)
            if held.is_state != (index in contents.states):
                raise UsageError(f"layer {layer} keeps a state at one end, and rows at the other")
            is_whole = first == has_come or self._kv.windows[index] is not None
            if not (is_whole and has_come <= first <= end):
                raise UsageError(
                    f"layer {layer} was to come from position {has_come} to {end}, and begins at "
                    f"{first}"
                )
            expected = contents.states[index].n_bytes if held.is_state else 0
            if self._kv.has_rows(index):
                expected += (end - first) * contents.row_bytes([index])
            if held.n_bytes != expected:
                raise UsageError(
                    f"layer {layer} of sequence {sequence_id} comes as {held.n_bytes} bytes, and "
                    f"has {expected} here"
                )
            arriving.firsts[index] = first
            if self._kv.has_rows(index):
                begin = arriving.pieces[index][0].first if has_come else first
                self._reach(contents, index, begin, arriving.n_blocks)

    def write(
        self, sequence_id: SequenceId, layer: int, begin: int, end: int, data: bytearray
    ) -> None:
        """Take in positions `[begin, end)` of a layer, and its state if any, as they were read.

        They count when the layer `came`.
        """
        with self._lock:
            arriving, index = self._begun(sequence_id, layer)
            contents, source = arriving.contents, torch.frombuffer(data, dtype=torch.uint8)
            if index in contents.states:
                state = contents.states[index]
                state.write(source[: state.n_bytes])
                # What follows it need not be aligned there.
                source = source[state.n_bytes :].clone()
            if source.numel():
                contents.write_rows([index], begin, end, source)

    def came(self, sequence_id: SequenceId, layer: int, end: int) -> None:
        """Note that all that was expected of a layer up to position `end` is here."""
        with self._lock:
            arriving, index = self._begun(sequence_id, layer)
            arriving.came(index, end)

    def take_own(self, sequence_id: SequenceId, layer: int, held: HeldLayer) -> None:
        """Take a layer from a slot of another stage of this node; rows are copied where shared.

        A state is copied without those that were noted, of which the head's new slot knows nothing.
        Nothing before its end may be written there afterwards. Raises UsageError for rows of
        another form, and if the slot has gone on so far that its window has dropped what the next
        row attends to.
        """
        if held.form != self.form(layer):
            raise UsageError(f"rows of {self.form(layer)} are needed, and here are {held.form}")
        first, end, there = held.held(0).first, held.end, held.index
        window = self._kv.windows[layer - self.layers.start]
        if first and window is not None and end - window + 1 < first:
            raise UsageError(
                f"the slot holds layer {layer} from position {first} on, and was to go on from "
                f"{end} with a window of {window}"
            )
        with self._lock:
            arriving, here = self._begun(sequence_id, layer)
            contents, begin = arriving.contents, first // BLOCK_POSITIONS * BLOCK_POSITIONS
            state = held.state
            if state is not None and held.is_kept:
                state = state.clone()
            if self._kv.has_rows(here) and begin < first:
                self._resize(contents, here, begin, blocks_for(end))
                for values, rows in enumerate((contents.keys[here], contents.values[here])):
                    rows[:, first - begin : end - begin] = held.contents.rows(
                        there, first, end, values=bool(values)
                    )
            elif self._kv.has_rows(here):
                span = (there, first, held.contents.end(there))
                contents.keys[here] = held.contents.rows(*span)
                contents.values[here] = held.contents.rows(*span, values=True)
                contents.firsts[here] = first
            arriving.pieces[here] = [_Piece(first=first, end=end, state=state)]

    def is_whole(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """Say whether every layer of the first `n_positions` has come, and maybe more of some."""
        with self._lock:
            return self._whole(sequence_id, n_positions) is not None

    def _whole(self, sequence_id: SequenceId, n_positions: int) -> list[_Piece] | None:
        """Return what the next row needs of each layer, None if it has not all come."""
        arriving = self._arriving.get(sequence_id)
        if arriving is None:
            return None
        found = [
            arriving.piece(index, n_positions, window)
            for index, window in enumerate(self._kv.windows)
        ]
        pieces = [piece for piece in found if piece is not None]
        return pieces if len(pieces) == len(found) else None

    def has(self, sequence_id: SequenceId) -> bool:
        """Say whether something has come for a sequence."""
        return sequence_id in self._arriving

    def adopt(self, sequence_id: SequenceId, slot: SlotId, n_positions: int) -> Sequence[int]:
        """Let `slot` hold what has come for a sequence; return the tokens of its positions.

        Raises UsageError if that is not all of its first `n_positions`, CapacityError as
        KvCache.adopt.
        """
        with self._lock:
            pieces = self._whole(sequence_id, n_positions)
            if pieces is None:
                raise UsageError(
                    f"{n_positions} positions were not moved for sequence {sequence_id}"
                )
            arriving = self._arriving.pop(sequence_id)
        contents, n_blocks = arriving.contents, blocks_for(n_positions)
        for index, piece in enumerate(pieces):
            if piece.state is not None:
                contents.states[index] = piece.state
            if self._kv.has_rows(index):
                first = piece.first // BLOCK_POSITIONS * BLOCK_POSITIONS
                self._resize(contents, index, first, n_blocks)
        self._kv.adopt(slot, contents, n_blocks)
        return arriving.token_ids

    def take_arrivals(self, other: Moves) -> None:
        """Have what has come for the same layers before their weights were loaded."""
        for part in other.parts:
            if part.layers == self.layers:
                with self._lock, part._lock:
                    self._arriving, part._arriving = part._arriving, {}

    @property
    def parts(self) -> tuple[SlotMoves, ...]:
        """What moves each range of layers."""
        return (self,)

    def forget(self, sequence_id: SequenceId | None = None) -> None:
        """Drop what has come for a sequence, or for any."""
        with self._lock:
            if sequence_id is None:
                self._arriving.clear()
            else:
                self._arriving.pop(sequence_id, None)

    def _reach(self, contents: SlotContents, index: int, first: int, n_blocks: int) -> None:
        """Let the tensors of a layer hold rows from `first` to the end of `n_blocks`, and more.

        So they are seldom copied: in a time that is proportional to what they hold in the end.
        """
        begin = first // BLOCK_POSITIONS
        if contents.end(index) < n_blocks * BLOCK_POSITIONS:
            n_more = (n_blocks - begin) // 4
            self._resize(contents, index, begin * BLOCK_POSITIONS, n_blocks + n_more)

    def _resize(self, contents: SlotContents, index: int, first: int, n_blocks: int) -> None:
        """Let the tensors of a layer hold positions `[first, end of n_blocks)`, and keep rows."""
        old_first, keys = contents.firsts[index], contents.keys[index]
        n_rows = n_blocks * BLOCK_POSITIONS - first
        if (old_first, keys.shape[1]) == (first, n_rows):
            return
        begin, end = max(first, old_first), min(old_first + keys.shape[1], first + n_rows)
        for held, new in zip(
            (contents.keys, contents.values), self._kv.new_rows(index, n_rows), strict=True
        ):
            if begin < end:
                new[:, begin - first : end - first] = held[index][
                    :, begin - old_first : end - old_first
                ]
            held[index] = new
        contents.firsts[index] = first


def _state(contents: SlotContents, index: int, end: int) -> SlotState | None:
    """Copy a layer's state after `end` positions, None where it keeps none. Raises UsageError."""
    state = contents.states.get(index)
    if state is None:
        return None
    found = state.at(end)
    if found is None:
        raise UsageError(
            f"the slot has the state after {state.end} positions, and not that after {end}"
        )
    return found.clone()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # numpy's arrays are buffers, which its types do not say
    return memoryview(array).cast("B")


class JoinedMoves:
    """Gives away and takes in for `parts`, in the order of their layers; each moves its own."""

    def __init__(self, parts: Sequence[SlotMoves]) -> None:
        self.parts = tuple(parts)

    @property
    def layers(self) -> LayerRange:
        """All layers of which something is moved."""
        return LayerRange(self.parts[0].layers.start, self.parts[-1].layers.end)

    def take_arrivals(self, other: Moves) -> None:
        """See SlotMoves."""
        for part in self.parts:
            part.take_arrivals(other)

    def begin(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """See SlotMoves."""
        for part in self.parts:
            part.begin(sequence_id, token_ids)

    def look(
        self, sequence_id: SequenceId, slot: SlotId, end: int, state: StateId | None = None
    ) -> dict[int, HeldLayer]:
        """See SlotMoves."""
        parts = [part.look(sequence_id, slot, end, state) for part in self.parts]
        return {layer: held for part in parts for layer, held in part.items()}

    def is_whole(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """See SlotMoves."""
        return all(part.is_whole(sequence_id, n_positions) for part in self.parts)

    def forget(self, sequence_id: SequenceId | None = None) -> None:
        """See SlotMoves."""
        for part in self.parts:
            part.forget(sequence_id)

    def part_of(self, layer: int) -> SlotMoves:
        """See SlotMoves; the first part refuses a layer that none has."""
        return next((part for part in self.parts if part.has_layer(layer)), self.parts[0])


Moves: TypeAlias = SlotMoves | JoinedMoves
"""What moves a stage, of one part or joined of several."""
