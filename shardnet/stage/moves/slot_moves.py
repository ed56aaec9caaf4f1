"""The keys, values and states of sequences on their way between the stages of two plans.

Knows layers by their number in the model, positions, and rows as plain bytes; several ranges of
layers of one node are moved as if they were one stage. Must not know links,
rings or which node has what. All of it runs on the compute thread, in pieces that are short.

What arrives for a sequence lies apart, on the CPU, until the sequence opens its slot. It may come
in several rounds while the sequence goes on elsewhere: answered rows do not change any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardnet.errors import CapacityError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.slot_operations import OpenSequence
from shardnet.types import BLOCK_POSITIONS, HeldRows, LayerRange, SequenceId, SlotId, blocks_for

MAX_ARRIVING: Final = 256
"""Sequences that may lie here and have not been opened."""


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """What has come for a sequence. Layer `n` has rows up to position `ends[n]`, or its state."""

    contents: SlotContents
    n_blocks: int
    ends: list[int]
    token_ids: Sequence[int]


class SlotMoves:
    """Gives away what slots of `kv` hold, and takes in what other stages held of `layers`.

    `owners` are the sequences that own slots now: the stage keeps them.
    """

    def __init__(
        self, kv: KvCache, layers: LayerRange, owners: Mapping[SlotId, OpenSequence]
    ) -> None:
        self._kv = kv
        self._layers = layers
        self._owners = owners
        self._arriving: dict[SequenceId, _Arriving] = {}

    def form(self, layer: int) -> str:
        """What the rows of a layer look like here; only equal ones can be taken in."""
        return self._kv.form(layer - self._layers.start)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of positions over all layers: an upper bound with windows."""
        return self._kv.block_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all layers that keep one."""
        return self._kv.state_bytes

    def has_layer(self, layer: int) -> bool:
        """Say whether it moves a layer."""
        return self._layers.start <= layer < self._layers.end

    def part_of(self, layer: int) -> SlotMoves:
        """Return what moves a layer: itself, unless it is joined of several."""
        return self

    # --- what leaves

    def held(
        self, sequence_id: SequenceId, slot: SlotId, layer: int, begin: int, end: int
    ) -> HeldRows:
        """Say what there is of positions `[begin, end)` of a sequence in a layer.

        Rows before `first` are gone where the layer has a window. A state counts whole, with all
        rows beside it, and is that after `end` positions. Raises UsageError if the sequence does
        not own the slot, or it holds no such rows.
        """
        contents, index = self._contents(sequence_id, slot, layer)
        if index in contents.states:
            state = contents.states[index]
            if state.at(end) is None:
                raise UsageError(
                    f"the state of sequence {sequence_id} is that after {state.end} positions, and "
                    f"was asked for after {end}"
                )
            n_bytes = state.n_bytes + self._bytes_beside(contents, index, end)
            return HeldRows(first=0, n_bytes=n_bytes, is_state=True)
        if not self._kv.holds(slot, end) or begin > end:
            raise UsageError(
                f"positions {begin} to {end} of sequence {sequence_id} were asked for, and slot "
                f"{slot} does not hold them"
            )
        first = max(begin, contents.first(index))
        return HeldRows(first=first, n_bytes=max(0, end - first) * contents.row_bytes([index]))

    def read(
        self, sequence_id: SequenceId, slot: SlotId, layer: int, begin: int, end: int
    ) -> memoryview:
        """Copy positions `[begin, end)` of a layer, or all of its state, as plain bytes.

        Raises UsageError as `held`.
        """
        held = self.held(sequence_id, slot, layer, begin, end)
        contents, index = self._contents(sequence_id, slot, layer)
        if index in contents.states:
            state = torch.empty(contents.states[index].n_bytes, dtype=torch.uint8)
            (contents.states[index].at(end) or contents.states[index]).read(state)
            rows = torch.empty(held.n_bytes - state.numel(), dtype=torch.uint8)
            if rows.numel():
                contents.read_rows([index], 0, end, rows)
            return _bytes_of(torch.cat((state, rows)))
        buffer = torch.empty(held.n_bytes, dtype=torch.uint8)
        if held.first > begin:
            raise UsageError(f"slot {slot} has dropped position {begin} meanwhile")
        contents.read_rows([index], begin, end, buffer)
        return _bytes_of(buffer)

    def _contents(
        self, sequence_id: SequenceId, slot: SlotId, layer: int
    ) -> tuple[SlotContents, int]:
        owner = self._owners.get(slot)
        if owner is None or owner.sequence_id != sequence_id:
            raise UsageError(f"sequence {sequence_id} does not own slot {slot}")
        if not self.has_layer(layer):
            raise UsageError(f"layer {layer} was asked for, and {self._layers.words} are here")
        if not self._kv.holds(slot, 1):
            raise UsageError(f"slot {slot} of sequence {sequence_id} is empty")
        return self._kv.contents(slot), layer - self._layers.start

    def _bytes_beside(self, contents: SlotContents, index: int, end: int) -> int:
        """Count the bytes of the rows that a layer with a state has beside it."""
        return end * contents.row_bytes([index]) if self._kv.has_rows(index) else 0

    # --- what arrives

    def begin(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Make room for the positions of `token_ids` of a sequence, beside what has come already.

        Raises CapacityError if there is none.
        """
        n_blocks = blocks_for(len(token_ids))
        others = [each for key, each in self._arriving.items() if key != sequence_id]
        wanted = n_blocks + sum(each.n_blocks for each in others)
        if len(others) >= MAX_ARRIVING or wanted > self._kv.room_blocks:
            raise CapacityError(
                f"{len(others) + 1} sequences of {wanted} KV blocks were to be moved here, and "
                f"there is room for {self._kv.room_blocks} blocks",
                remedy="send the request again",
            )
        arriving = self._arriving.get(sequence_id)
        if arriving is None:
            contents, ends = self._kv.new_contents(0), [0] * len(self._layers)
            arriving = _Arriving(
                contents=contents, n_blocks=n_blocks, ends=ends, token_ids=token_ids
            )
            self._arriving[sequence_id] = arriving
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
        return arriving, layer - self._layers.start

    def next_wanted(self, sequence_id: SequenceId, layer: int) -> int:
        """Return the first position of a layer that has not come yet."""
        arriving, index = self._begun(sequence_id, layer)
        return arriving.ends[index]

    def expect(self, sequence_id: SequenceId, layer: int, held: HeldRows, end: int) -> None:
        """Make room for what a source holds of a layer up to position `end`.

        Raises UsageError if it cannot be what this stage would hold, CapacityError without memory.
        """
        arriving, index = self._begun(sequence_id, layer)
        contents, has_come, first = arriving.contents, arriving.ends[index], held.first
        if held.is_state != (index in contents.states):
            raise UsageError(f"layer {layer} keeps a state at one end, and rows at the other")
        if held.is_state:
            beside = self._bytes_beside(contents, index, end)
            expected = contents.states[index].n_bytes + beside
        else:
            is_inside = first != has_come and first % BLOCK_POSITIONS != 0
            if is_inside or not has_come <= first <= end:
                raise UsageError(
                    f"layer {layer} was to come from position {has_come} to {end}, and begins at "
                    f"{first}"
                )
            expected = (end - first) * contents.row_bytes([index])
        if held.n_bytes != expected:
            raise UsageError(
                f"layer {layer} of sequence {sequence_id} comes as {held.n_bytes} bytes, and has "
                f"{expected} here"
            )
        if self._kv.has_rows(index):
            begin = contents.firsts[index] if has_come and first == has_come else first
            self._resize(contents, index, begin, arriving.n_blocks)

    def write(
        self, sequence_id: SequenceId, layer: int, begin: int, end: int, data: bytearray
    ) -> None:
        """Take in positions `[begin, end)` of a layer, or all of its state, as `read` gave them.

        They count when the layer `came`.
        """
        arriving, index = self._begun(sequence_id, layer)
        contents, source = arriving.contents, torch.frombuffer(data, dtype=torch.uint8)
        if index in contents.states:
            n_bytes = contents.states[index].n_bytes
            contents.states[index].write(source[:n_bytes])
            source = source[n_bytes:].clone()  # what follows it need not be aligned there
        if source.numel():
            contents.write_rows([index], begin, end, source)

    def came(self, sequence_id: SequenceId, layer: int, end: int) -> None:
        """Note that all that was expected of a layer up to position `end` is here."""
        arriving, index = self._begun(sequence_id, layer)
        if index in arriving.contents.states:
            arriving.contents.states[index].end = end
        arriving.ends[index] = end

    def take_own(
        self, sequence_id: SequenceId, other: Moves, slot: SlotId, layer: int, end: int
    ) -> None:
        """Take a layer from a slot of another stage of this node; rows are copied where shared.

        A state is copied without those that were noted, of which the head's new slot knows nothing.
        Nothing before `end` may be written there afterwards. Raises UsageError as `held`, for rows
        of another form, and if the slot has gone on so far that its window has dropped what the
        next row attends to.
        """
        source = other.part_of(layer)
        first = source.held(sequence_id, slot, layer, 0, end).first
        if source.form(layer) != self.form(layer):
            raise UsageError(
                f"rows of {self.form(layer)} are needed, and here are {source.form(layer)}"
            )
        contents, there = source._contents(sequence_id, slot, layer)
        window = self._kv.windows[layer - self._layers.start]
        if first and window is not None and end - window + 1 < first:
            raise UsageError(
                f"slot {slot} holds layer {layer} from position {first} on, and was to go on from "
                f"{end} with a window of {window}"
            )
        arriving, here = self._begun(sequence_id, layer)
        if there in contents.states:
            found = contents.states[there].at(end)
            assert found is not None, "held has looked"
            arriving.contents.states[here] = found.clone()
        if self._kv.has_rows(here):
            rows = (there, contents.first(there), contents.end(there))
            arriving.contents.keys[here] = contents.rows(*rows)
            arriving.contents.values[here] = contents.rows(*rows, values=True)
            arriving.contents.firsts[here] = contents.first(there)
        arriving.ends[here] = end

    def is_whole(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """Say whether every layer of the first `n_positions` has come, and maybe more of some."""
        arriving = self._arriving.get(sequence_id)
        return arriving is not None and all(
            self._has_come(arriving, index, n_positions) for index in range(len(arriving.ends))
        )

    def _has_come(self, arriving: _Arriving, index: int, n_positions: int) -> bool:
        """Say whether the next row can attend to what has come of a layer."""
        end, first = arriving.ends[index], arriving.contents.firsts[index]
        if index in arriving.contents.states:
            return end == n_positions
        window = self._kv.windows[index]
        is_seen = not first or (window is not None and first <= n_positions - window + 1)
        return end >= n_positions and is_seen

    def has(self, sequence_id: SequenceId) -> bool:
        """Say whether something has come for a sequence."""
        return sequence_id in self._arriving

    def adopt(self, sequence_id: SequenceId, slot: SlotId, n_positions: int) -> Sequence[int]:
        """Let `slot` hold what has come for a sequence; return the tokens of its positions.

        Raises UsageError if that is not all of its first `n_positions`, CapacityError as
        KvCache.adopt.
        """
        if not self.is_whole(sequence_id, n_positions):
            raise UsageError(f"{n_positions} positions were not moved for sequence {sequence_id}")
        arriving = self._arriving.pop(sequence_id)
        n_blocks = blocks_for(n_positions)
        for index, first in enumerate(arriving.contents.firsts):
            if self._kv.has_rows(index):
                self._resize(arriving.contents, index, first, n_blocks)
        self._kv.adopt(slot, arriving.contents, n_blocks)
        return arriving.token_ids

    def forget(self, sequence_id: SequenceId | None = None) -> None:
        """Drop what has come for a sequence, or for any."""
        if sequence_id is None:
            self._arriving.clear()
        else:
            self._arriving.pop(sequence_id, None)

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


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # numpy's arrays are buffers, which its types do not say
    return memoryview(array).cast("B")


class JoinedMoves:
    """Gives away and takes in for `parts`, in the order of their layers; each moves its own."""

    def __init__(self, parts: Sequence[SlotMoves]) -> None:
        self._parts = tuple(parts)

    def begin(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """See SlotMoves."""
        for part in self._parts:
            part.begin(sequence_id, token_ids)

    def is_whole(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """See SlotMoves."""
        return all(part.is_whole(sequence_id, n_positions) for part in self._parts)

    def forget(self, sequence_id: SequenceId | None = None) -> None:
        """See SlotMoves."""
        for part in self._parts:
            part.forget(sequence_id)

    def part_of(self, layer: int) -> SlotMoves:
        """See SlotMoves; the first part refuses a layer that none has."""
        return next((part for part in self._parts if part.has_layer(layer)), self._parts[0])


Moves: TypeAlias = SlotMoves | JoinedMoves
"""What moves a stage, of one part or joined of several."""
