"""Slots of the KV cache: owners, prefixes kept warm, and booked blocks. Pure.

A slot belongs to one sequence, or it is warm: free, its content kept until the room is needed. The
head's view holds on every stage in data order, so a slot may be copied while rows for it are still
in flight. Should these fail, the copy is worth nothing. A warm slot holds what was answered alone.

A key stands for all tokens from the first up to the end of its block, and for the ring that
computed them: two rings whose keys and values differ in a bit never share a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardnet.slot_operations import AdapterUse, PicturePlace, Pictures, alike_until, whole_before
from shardnet.types import (
    BLOCK_KEY_BYTES,
    BLOCK_POSITIONS,
    MAX_STORED_BLOCKS,
    NOTED_STATES,
    REWIND_ROWS,
    SlotId,
    blocks_for,
    is_noted,
    settled_blocks,
)


@dataclass(slots=True, eq=False)
class SharedBlock:
    """A block that so many slots have in common on every stage."""

    users: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One slot. Its first `n_held` positions hold keys and values of the first of `tokens`.

    `n_chunked` of them were computed in whole prompt chunks. `n_written` is the highest position
    ever written plus one, rejected drafts included. The first of its `n_blocks` may be `shared`.
    `n_shared` counts the sequences that were started with a copy of it. Its sequence was started
    with the first `n_kept`. The rows of the first `n_answered` positions were answered: every stage
    has computed them. All were computed with the same `adapters`, and with `pictures`. Stages have
    noted the state of layers that keep one after each of the `noted` positions.
    """

    slot: SlotId
    tokens: Sequence[int] = ()
    adapters: tuple[AdapterUse, ...] = ()
    pictures: Pictures = ()
    n_held: int = 0
    n_chunked: int = 0
    n_written: int = 0
    n_kept: int = 0
    n_answered: int = 0
    noted: tuple[int, ...] = ()
    n_blocks: int = 0
    shared: tuple[SharedBlock, ...] = ()
    n_shared: int = 0
    is_warm: bool = False
    used_at: int = 0

    def note_answered(self, position: int, end: int) -> None:
        """Note that rows `[position, end)` were answered. Rows are answered in their order.

        So are steps: with a slot's first rows those are known that it was started with.
        """
        if position <= self.n_answered or position == self.n_kept:
            self.n_answered = end

    def note_state(self, position: int, n_rows: int) -> None:
        """Note that stages note the state before rows, as their caches decide it too."""
        if is_noted(position, n_rows, self.noted):
            self.noted = (*self.noted[1 - NOTED_STATES :], position)

    def known_states(self) -> tuple[int, ...]:
        """Positions after which stages know the states of its layers."""
        return (*self.noted, self.n_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A slot assigned to a sequence, its first `n_kept` positions computed already.

    They are in the slot, copied from the slot `source`, or were read from disk. Where it
    `is_unsure`, rows of theirs are still in flight. The warm slots `given_up` must be freed before.
    """

    slot: Slot
    n_kept: int
    source: SlotId | None = None
    is_restored: bool = False
    is_unsure: bool = False
    given_up: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A reusable prefix: the first `n_kept` positions of `slot`, all it holds if `is_whole`."""

    slot: Slot
    n_kept: int
    is_whole: bool

    @property
    def rank(self) -> tuple[int, bool, bool]:
        """Sort key, the better prefix higher: longer first, then without a copy."""
        return (self.n_kept, self.is_whole, self.slot.is_warm)


@dataclass(slots=True, kw_only=True)
class KvBlockManager:
    """All slots of a ring. `room_blocks` is the smallest room of its stages, per stage.

    `window` is the smallest sliding window of the model's layers, None where none has one: such
    layers drop old positions (design decision 6), and a slot cannot be rewound below its `floor`.
    `state_slots` is the most slots, warm ones included, of a model whose layers keep a state, None
    where none does: such a slot can be continued only from where its state is known. Warm slots
    hold at most `most_warm_blocks` together, None for all of the room. Where every stage `shares`
    blocks, a slot that is started with a prefix of another has its whole blocks in common with it:
    they are booked once, and a slot that is rewound into one gets a block of its own.
    """

    room_blocks: int
    most_warm_blocks: int | None = None
    window: int | None = None
    state_slots: int | None = None
    shares: bool = False
    least_copied: int = 16
    """A shorter common prefix is not worth a copy."""
    _slots: dict[SlotId, Slot] = field(default_factory=dict)
    _free_ids: list[SlotId] = field(default_factory=list)
    _booked: int = 0
    _uses: int = 0

    @property
    def booked_blocks(self) -> int:
        """Blocks booked on every stage, warm slots included."""
        return self._booked

    @property
    def warm_blocks(self) -> int:
        """Blocks held by warm slots alone, which can be freed."""
        return _only_in(slot for slot in self._slots.values() if slot.is_warm)

    @property
    def available_blocks(self) -> int:
        """Blocks that a sequence could get if all warm slots were freed."""
        return self.room_blocks - self._booked + self.warm_blocks

    def prefix(
        self,
        prompt: Sequence[int],
        adapters: tuple[AdapterUse, ...] = (),
        pictures: Pictures = (),
        *,
        chunk_rows: int = 0,
    ) -> Prefix | None:
        """Find the longest prefix of `prompt` that a slot with the same `adapters` holds, or None.

        It ends before the first of `pictures` that is another one there, and cuts none that must
        not be. The last token never counts, because its row must be computed to be sampled. With
        `chunk_rows` only whole prompt chunks of that many rows count (design decision 4).
        """
        best: Prefix | None = None
        for slot in self._slots.values():
            if slot.adapters != adapters:
                continue
            most = min(len(prompt) - 1, slot.n_held)
            differs = alike_until(slot.pictures, pictures)
            most = most if differs is None else min(most, differs)
            common = common_prefix(slot.tokens, prompt, most)
            n_kept = (
                min(common, slot.n_chunked) // chunk_rows * chunk_rows if chunk_rows else common
            )
            n_kept = whole_before(pictures, n_kept)
            if self.state_slots is not None:
                known = (
                    n for n in slot.known_states() if n <= n_kept and n % (chunk_rows or 1) == 0
                )
                n_kept = max(known, default=0)
            elif n_kept < self.floor(slot):
                continue
            found = Prefix(slot=slot, n_kept=n_kept, is_whole=common == slot.n_held)
            if n_kept and (best is None or found.rank > best.rank):
                best = found
        return best

    def floor(self, slot: Slot) -> int:
        """Return the fewest positions to which the slot can be rewound, other than 0.

        A layer with a sliding window keeps at least the window and the last `REWIND_ROWS` rows
        (model/cache/kv_cache.py); earlier positions may be gone.
        """
        if self.window is None or slot.n_written <= self.window + REWIND_ROWS:
            return 0
        return slot.n_written - REWIND_ROWS

    def start(
        self,
        prompt: Sequence[int],
        n_blocks: int,
        adapters: tuple[AdapterUse, ...] = (),
        pictures: Pictures = (),
        *,
        chunk_rows: int = 0,
    ) -> Start | None:
        """Assign a slot with `n_blocks` blocks; None, and nothing changed, if they cannot be had.

        A warm slot is continued if all of it is a prefix of the prompt or there is no room for a
        copy; otherwise the common prefix is copied, or its whole blocks are shared. For the
        other arguments see `prefix`.
        """
        assert blocks_for(len(prompt)) <= n_blocks
        if n_blocks - self._shareable(len(prompt) - 1) > self.available_blocks:
            return None
        prefix = self.prefix(prompt, adapters, pictures, chunk_rows=chunk_rows)
        start = None
        if prefix is not None and prefix.n_kept >= self.least_copied:
            start = self._start_with(prefix, n_blocks)
        if start is None and n_blocks <= self.available_blocks:
            start = self.start_empty(n_blocks)
        return start

    def _shareable(self, n_positions: int) -> int:
        return settled_blocks(n_positions) if self.shares else 0

    def _start_with(self, prefix: Prefix, n_blocks: int) -> Start | None:
        source, n_kept = prefix.slot, prefix.n_kept
        room_beside = (
            self.room_blocks
            - self._booked
            + _only_in(slot for slot in self._slots.values() if slot.is_warm and slot is not source)
        )
        n_shared = self._shareable(n_kept)
        is_room = n_blocks - n_shared <= room_beside
        has_slot = self.state_slots is None or self._n_kept_slots(source) < self.state_slots
        if source.is_warm and (prefix.is_whole or not is_room or not has_slot):
            return self._continue(prefix, n_blocks, room_beside)
        if not is_room:
            return None
        given_up = self._make_room(n_blocks - n_shared, n_slots=1, spare=source)
        source.n_shared += 1
        self._touch(source)
        more = max(0, n_shared - len(source.shared))
        self._book(source, source.n_blocks, (*source.shared, *(SharedBlock() for _ in range(more))))
        slot = self._new(n_blocks, source.shared[:n_shared])
        slot.n_chunked = min(source.n_chunked, n_kept)
        slot.n_written = source.n_written  # the copy lacks what the source has forgotten
        return Start(
            slot=slot,
            n_kept=n_kept,
            source=source.slot,
            is_unsure=source.n_answered < n_kept,
            given_up=given_up,
        )

    def start_empty(self, n_blocks: int) -> Start:
        """Assign an empty slot with `n_blocks` blocks, which must be available."""
        given_up = self._make_room(n_blocks, n_slots=1)
        return Start(slot=self._new(n_blocks), n_kept=0, given_up=given_up)

    def restored(self, slot: Slot, n_positions: int) -> None:
        """Note that every stage holds the first positions of an empty slot, and no more.

        With a window that is its end alone: the slot cannot be rewound before it.
        """
        slot.n_held = n_positions
        slot.n_written = n_positions + (REWIND_ROWS if self.window is not None else 0)

    def grow(self, slot: Slot, n_positions: int) -> tuple[Slot, ...] | None:
        """Book the slot for `n_positions`. Returns the warm slots that were freed for it.

        None, and nothing changed, where the blocks cannot be had.
        """
        more = blocks_for(n_positions) - slot.n_blocks
        if more <= 0:
            return ()
        if more > self.available_blocks:
            return None
        given_up = self._make_room(more)
        self._book(slot, slot.n_blocks + more, slot.shared)
        return given_up

    def worth_keeping(self, slot: Slot) -> int:
        """Count the first positions with which a sequence's slot can be kept warm; 0 for none.

        Their rows were answered, and it can be rewound to behind them.
        """
        n_kept = min(slot.n_held, slot.n_answered)
        if self.state_slots is not None:
            n_kept = max((n for n in slot.known_states() if n <= n_kept), default=0)
        return n_kept if n_kept >= max(self.least_copied, self.floor(slot)) else 0

    def keep_warm(self, slot: Slot, n_kept: int) -> tuple[Slot, ...]:
        """Keep the first positions of a sequence's slot, warm for a prompt that begins alike.

        Returns the warm slots that were dropped for it, beyond `most_warm_blocks`.
        """
        slot.is_warm = True
        self._rewind(slot, n_kept)
        slot.n_held = n_kept
        self._book(slot, blocks_for(slot.n_held), slot.shared[: settled_blocks(slot.n_held)])
        self._touch(slot)
        dropped = []
        if self.most_warm_blocks is not None:
            others = [other for other in self.warm() if other is not slot]
            while others and self.warm_blocks > self.most_warm_blocks:
                dropped.append(others.pop(0))
                self.drop(dropped[-1])
        return tuple(dropped)

    def drop(self, slot: Slot) -> None:
        """Free a slot."""
        self._book(slot, 0, ())
        del self._slots[slot.slot]
        self._free_ids.append(slot.slot)

    def warm(self) -> list[Slot]:
        """List the warm slots in the order to free them: unshared first, then longest unused."""
        warm = [slot for slot in self._slots.values() if slot.is_warm]
        return sorted(warm, key=lambda slot: (slot.n_shared > 0, slot.used_at))

    def _continue(self, prefix: Prefix, n_blocks: int, room_beside: int) -> Start | None:
        slot, n_kept = prefix.slot, prefix.n_kept
        shared = slot.shared[: settled_blocks(n_kept)]
        n_freed = [block.users for block in slot.shared[len(shared) :]].count(1)
        n_own = slot.n_blocks - len(slot.shared) + n_freed
        more = n_blocks - len(shared) - n_own
        if more > room_beside:
            return None
        slot.is_warm = False
        self._rewind(slot, n_kept)
        given_up = self._make_room(more)
        self._book(slot, n_blocks, shared)
        return Start(slot=slot, n_kept=n_kept, given_up=given_up)

    def _rewind(self, slot: Slot, n_kept: int) -> None:
        slot.n_chunked = min(slot.n_chunked, n_kept)
        slot.n_answered = min(slot.n_answered, n_kept)
        slot.noted = tuple(n for n in slot.noted if n < n_kept)  # one may have become the state

    def _make_room(
        self, n_blocks: int, *, n_slots: int = 0, spare: Slot | None = None
    ) -> tuple[Slot, ...]:
        """Drop warm slots until `n_blocks` and `n_slots` more are free; return those dropped."""
        given_up = []
        for slot in self.warm():
            if self._has_room(n_blocks, n_slots):
                break
            if slot is not spare:
                self.drop(slot)
                given_up.append(slot)
        assert self._has_room(n_blocks, n_slots)
        return tuple(given_up)

    def _n_kept_slots(self, source: Slot) -> int:
        """Count the slots that cannot be given up: those in use, and `source`."""
        return sum(not slot.is_warm or slot is source for slot in self._slots.values())

    def _has_room(self, n_blocks: int, n_slots: int) -> bool:
        is_full = self.state_slots is not None and len(self._slots) + n_slots > self.state_slots
        return self.room_blocks - self._booked >= n_blocks and not is_full

    def _new(self, n_blocks: int, shared: tuple[SharedBlock, ...] = ()) -> Slot:
        slot = Slot(slot=self._free_ids.pop() if self._free_ids else SlotId(len(self._slots)))
        self._slots[slot.slot] = slot
        self._book(slot, n_blocks, shared)
        return slot

    def _book(self, slot: Slot, n_blocks: int, shared: tuple[SharedBlock, ...]) -> None:
        """Let a slot have so many blocks, the first of them `shared`. Each is counted once."""
        for block in shared:
            self._booked += block.users == 0
            block.users += 1
        for block in slot.shared:
            block.users -= 1
            self._booked -= block.users == 0
        self._booked += (n_blocks - len(shared)) - (slot.n_blocks - len(slot.shared))
        slot.n_blocks, slot.shared = n_blocks, shared

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.used_at = self._uses


def _only_in(slots: Iterable[Slot]) -> int:
    """Count the blocks that no other slots have."""
    n_own, users = 0, Counter[SharedBlock]()
    for slot in slots:
        n_own += slot.n_blocks - len(slot.shared)
        users.update(slot.shared)
    return n_own + sum(block.users == n for block, n in users.items())


def common_prefix(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two token lists, at most `limit`.

    Compares block by block: comparing slices is many times faster than comparing tokens.
    """
    for start in range(0, limit, BLOCK_POSITIONS):
        end = min(start + BLOCK_POSITIONS, limit)
        if list(one[start:end]) != list(other[start:end]):
            return next(i for i in range(start, end) if one[i] != other[i])
    return limit


def block_keys(
    seed: bytes,
    tokens: Sequence[int],
    n_positions: int,
    adapters: Sequence[AdapterUse] = (),
    pictures: Sequence[PicturePlace] = (),
) -> tuple[bytes, ...]:
    """Return the keys of the whole blocks among the first `n_positions` of `tokens`.

    `seed` stands for the ring, which computed them with `adapters` and `pictures`. A block
    stands for all of the pictures that begin in it. At most MAX_STORED_BLOCKS keys are returned.
    """
    digest = hashlib.sha256(seed)
    for use in adapters:
        digest.update(use.adapter_id.encode() + struct.pack("<d", use.scale))
    keys, coming = [], [*pictures]
    for block in range(min(n_positions // BLOCK_POSITIONS, MAX_STORED_BLOCKS)):
        ids = tokens[block * BLOCK_POSITIONS : (block + 1) * BLOCK_POSITIONS]
        digest.update(struct.pack(f"<{BLOCK_POSITIONS}I", *ids))
        while coming and coming[0].position < (block + 1) * BLOCK_POSITIONS:
            place = coming.pop(0)
            digest.update(struct.pack("<I", place.position) + place.digest)
        keys.append(digest.digest()[:BLOCK_KEY_BYTES])
    return tuple(keys)
