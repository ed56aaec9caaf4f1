"""Slots of the KV cache: owners, prefixes kept warm, and booked blocks. Pure.

A slot belongs to one sequence, or it is warm: free, its content kept until the room is needed. The
head's view holds on every stage in data order, so a slot may be copied while rows for it are still
in flight. Should these fail, the copy is worth nothing. A warm slot holds what was answered alone.

Where layers keep a state a slot goes on only from a position whose state stages keep: a copy that
the slots refer to which begin with the same positions. It is worth what computing it again would
take, the more the more slots refer to it and the less the longer nobody used it.

A key stands for all tokens from the first up to the end of its block, and for the ring that
computed them: two rings whose keys and values differ in a bit never share a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from shardnet.slot_operations import AdapterUse, PicturePlace, Pictures, alike_until, whole_before
from shardnet.types import (
    BLOCK_KEY_BYTES,
    BLOCK_POSITIONS,
    LIVE_STATES,
    MAX_STORED_BLOCKS,
    REWIND_ROWS,
    SlotId,
    StateId,
    blocks_for,
    settled_blocks,
)


@dataclass(slots=True, eq=False)
class SharedBlock:
    """A block that so many slots have in common on every stage."""

    users: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class KeptState:
    """A state that every stage keeps: that after the first `position` tokens of `users` slots.

    From the one before it, in any of these slots, it takes `n_rows` to compute it again.
    """

    state: StateId
    position: int
    n_rows: int
    users: int = 0
    used_at: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One slot. Its first `n_held` positions hold keys and values of the first of `tokens`.

    `n_chunked` of them were computed in whole prompt chunks. `n_written` is the highest position
    ever written plus one, rejected drafts included. The first of its `n_blocks` may be `shared`.
    `n_shared` counts the sequences that were started with a copy of it. Its sequence was started
    with the first `n_kept`. The rows of the first `n_answered` positions were answered: every stage
    has computed them. All were computed with the same `adapters`, and with `pictures`. Where layers
    keep a state, stages have kept `states` of its positions, the first one first.
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
    states: tuple[KeptState, ...] = ()
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

    def state_before(self, n_positions: int, multiple: int = 1) -> KeptState | None:
        """Return the last state that was kept of the first positions, at a multiple of so many."""
        for kept in reversed(self.states):
            if kept.position <= n_positions and kept.position % multiple == 0:
                return kept
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A slot assigned to a sequence, its first `n_kept` positions computed already.

    They are in the slot, copied from the slot `source`, or were read from disk, and end with the
    kept `state` where layers have one. Where it `is_unsure`, rows of theirs are still in flight.
    The warm slots `given_up` must be freed before.
    """

    slot: Slot
    n_kept: int
    source: SlotId | None = None
    state: StateId | None = None
    is_restored: bool = False
    is_unsure: bool = False
    given_up: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A reusable prefix: the first `n_kept` positions of `slot`, which end with `state` if any.

    It `is_whole` if all that the slot holds is a prefix of the prompt.
    """

    slot: Slot
    n_kept: int
    is_whole: bool
    state: KeptState | None = None

    @property
    def state_id(self) -> StateId | None:
        """The id of the state, None without one."""
        return None if self.state is None else self.state.state

    @property
    def rank(self) -> tuple[int, bool, bool]:
        """Sort key, the better prefix higher: longer first, then without a copy."""
        return (self.n_kept, self.is_whole, self.slot.is_warm)


@dataclass(slots=True, kw_only=True)
class KvBlockManager:
    """All slots of a ring. `room_blocks` is the smallest room of its stages, per stage.

    `window` is the smallest sliding window of the model's layers, None where none has one: such
    layers drop old positions (design decision 6), and a slot cannot be rewound below its `floor`.
    `room_states` is the most states that stages hold, those of running sequences included, None
    where no layer keeps one. Where stages keep the rows of windows too, the largest of which is
    `kept_window`, a slot goes on from a state with these; where there is nothing else in a state,
    they take no more than what slots are booked for and have dropped. Warm slots hold at most
    `most_warm_blocks` together, None for all of the room, and at most `most_kept_states` are kept,
    None likewise. Where every stage `shares` blocks, a slot that is started with a prefix of
    another has its whole blocks in common with it: they are booked once, and a slot that is rewound
    into one gets a block of its own.
    """

    room_blocks: int
    most_warm_blocks: int | None = None
    window: int | None = None
    room_states: int | None = None
    most_kept_states: int | None = None
    kept_window: int | None = None
    shares: bool = False
    least_copied: int = 16
    """A shorter common prefix is not worth a copy."""
    _slots: dict[SlotId, Slot] = field(default_factory=dict)
    _free_ids: list[SlotId] = field(default_factory=list)
    _booked: int = 0
    _uses: int = 0
    _n_states: int = 0
    """States that were kept so far."""
    _kept: dict[KeptState, None] = field(default_factory=dict)
    """Those that are kept, the first one first."""
    _wanted: KeptState | None = None
    """What a slot is just being started with: it is not dropped."""
    _dropped: list[StateId] = field(default_factory=list)
    followed: frozenset[StateId] = frozenset()
    """States with which sequences go on when a stage is lost: all others are dropped before."""

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
            n_kept, state = whole_before(pictures, n_kept), None
            is_far = n_kept < self.floor(slot)
            if self.room_states is not None or (is_far and self.kept_window is not None):
                state = slot.state_before(n_kept, chunk_rows or 1)
                n_kept = 0 if state is None else state.position
            if n_kept < self.floor(slot) and self.kept_window is None:
                continue
            is_whole = common == slot.n_held
            found = Prefix(slot=slot, n_kept=n_kept, is_whole=is_whole, state=state)
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
            self._wanted = prefix.state
            start = self._start_with(prefix, n_blocks)
            self._wanted = None
        if start is None and n_blocks <= self.available_blocks:
            start = self.start_empty(n_blocks)
        return start

    def _shareable(self, n_positions: int, state: KeptState | None = None) -> int:
        """Count the blocks that are shared: with a kept state none that windows reach."""
        n_blocks = settled_blocks(n_positions) if self.shares else 0
        if state is None or self.kept_window is None:
            return n_blocks
        return min(n_blocks, max(0, n_positions - self.kept_window + 1) // BLOCK_POSITIONS)

    def _start_with(self, prefix: Prefix, n_blocks: int) -> Start | None:
        source, n_kept = prefix.slot, prefix.n_kept
        room_beside = (
            self.room_blocks
            - self._booked
            + _only_in(slot for slot in self._slots.values() if slot.is_warm and slot is not source)
        )
        n_shared = self._shareable(n_kept, prefix.state)
        is_room = n_blocks - n_shared <= room_beside
        if source.is_warm and (prefix.is_whole or not is_room):
            return self._continue(prefix, n_blocks, room_beside)
        if not is_room:
            return None
        given_up = self._make_room(n_blocks - n_shared, spare=source)
        source.n_shared += 1
        self._touch(source)
        more = max(0, n_shared - len(source.shared))
        self._book(source, source.n_blocks, (*source.shared, *(SharedBlock() for _ in range(more))))
        slot = self._new(n_blocks, source.shared[:n_shared])
        slot.n_chunked = min(source.n_chunked, n_kept)
        slot.n_written = source.n_written  # the copy lacks what the source has forgotten
        if prefix.state is not None and self.window is not None:
            slot.n_written = n_kept + REWIND_ROWS
        self._refer(slot, tuple(kept for kept in source.states if kept.position <= n_kept))
        self._use(prefix.state)
        self._evict(0)
        return Start(
            slot=slot,
            n_kept=n_kept,
            source=source.slot,
            state=prefix.state_id,
            is_unsure=source.n_answered < n_kept,
            given_up=given_up,
        )

    def start_empty(self, n_blocks: int) -> Start:
        """Assign an empty slot with `n_blocks` blocks, which must be available."""
        given_up = self._make_room(n_blocks)
        slot = self._new(n_blocks)
        self._evict(0)
        return Start(slot=slot, n_kept=0, given_up=given_up)

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
        if self.room_states is not None and n_kept < slot.n_held:
            kept = slot.state_before(n_kept)
            n_kept = 0 if kept is None else kept.position
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
        self._use(slot.states[-1] if slot.states else None)
        self._evict(0)
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
        self._refer(slot, ())
        del self._slots[slot.slot]
        self._evict(0)
        self._free_ids.append(slot.slot)

    def warm(self) -> list[Slot]:
        """List the warm slots in the order to free them: unshared first, then longest unused.

        Before all others go those from which nobody can go on: their states were dropped.
        """
        warm = [slot for slot in self._slots.values() if slot.is_warm]
        keeps = self.room_states is not None
        return sorted(
            warm,
            key=lambda slot: (not keeps or slot.states != (), slot.n_shared > 0, slot.used_at),
        )

    # --- states

    @property
    def keeps_states(self) -> bool:
        """Whether stages keep what slots cannot be rewound to."""
        return self.room_states is not None or self.kept_window is not None

    @property
    def kept_states(self) -> int:
        """States that stages keep apart from those of running sequences."""
        return len(self._kept)

    def keep_state(self, slot: Slot, position: int) -> StateId | None:
        """Let stages keep the slot's state after `position`; None where they do, or cannot."""
        is_kept = any(kept.position == position for kept in slot.states)
        if not self.keeps_states or is_kept:
            return None
        self._evict(1)
        if self._states_left() < 1:
            return None
        kept = KeptState(
            state=StateId(self._n_states),
            position=position,
            n_rows=position - (slot.states[-1].position if slot.states else 0),
            used_at=self._uses,
        )
        self._n_states = (self._n_states + 1) % (1 << 32)
        self._kept[kept] = None
        self._refer(slot, (*slot.states, kept))
        return kept.state

    def to_follow(self, slot: Slot, n_answered: int, *, is_prefilling: bool) -> KeptState | None:
        """Return what others follow a slot to that has answered so many positions and goes on.

        None is what it holds then. Rows behind a state were answered: all stages have kept it.
        """
        has_gone_on = is_prefilling or n_answered < self.floor(slot)
        if self.room_states is None and not (self.kept_window is not None and has_gone_on):
            return None
        return slot.state_before(n_answered - 1)

    def take_dropped(self) -> tuple[StateId, ...]:
        """Return the states that stages keep for nothing, once each."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _states_left(self) -> int:
        """Count the states that could be kept beside those that are, and those of who runs."""
        most = []
        if self.room_states is not None:
            n_live = LIVE_STATES * sum(not slot.is_warm for slot in self._slots.values())
            most.append(self.room_states - n_live)
            if self.most_kept_states is not None:
                most.append(self.most_kept_states)
        elif self.kept_window is not None:
            most.append(self._dropped_rows(self.kept_window) // self.kept_window)
        return min(most, default=0) - len(self._kept)

    def _dropped_rows(self, window: int) -> int:
        """Count the rows that layers with a window have dropped of what is booked, at the least."""
        n_rows = self._booked * BLOCK_POSITIONS
        for slot in self._slots.values():
            own = (slot.n_blocks - len(slot.shared)) * BLOCK_POSITIONS
            n_rows -= min(own, window + REWIND_ROWS + BLOCK_POSITIONS)
        chains = {slot.shared[-1]: len(slot.shared) for slot in self._slots.values() if slot.shared}
        for n_blocks in chains.values():
            n_rows -= min(n_blocks * BLOCK_POSITIONS, window + REWIND_ROWS)
        return max(0, n_rows)

    def _evict(self, n_states: int) -> None:
        """Drop the states that are worth least until there is room for so many."""
        while self._states_left() < n_states:
            followed = self._followed()
            others = (kept for kept in self._kept if kept is not self._wanted)
            least = min(
                others, key=lambda kept: (kept in followed, self._worth(kept)), default=None
            )
            if least is None:
                return
            self._forget({least})

    def _followed(self) -> set[KeptState]:
        """List the states with which sequences that still run go on when a stage is lost.

        They take half of the room at most: the rest is worth keeping for other prompts too.
        """
        slots = [slot for slot in self._slots.values() if not slot.is_warm]
        found = {kept for slot in slots for kept in slot.states if kept.state in self.followed}
        return found if 2 * len(found) <= self._states_left() + len(self._kept) else set()

    def _worth(self, kept: KeptState) -> float:
        return kept.n_rows * kept.users / (1 + self._uses - kept.used_at)

    def lose_states(self, slot: Slot) -> bool:
        """Forget the states that a slot began with, if none of its own rows was answered.

        A stage that had no memory to keep one has said nothing. Returns False for none.
        """
        lost = {kept for kept in slot.states if kept.position <= slot.n_kept}
        if not lost or slot.n_answered > slot.n_kept:
            return False
        self._forget(lost)
        return True

    def _forget(self, states: Set[KeptState]) -> None:
        for slot in self._slots.values():
            if not states.isdisjoint(slot.states):
                self._refer(slot, tuple(kept for kept in slot.states if kept not in states))
                before = 0
                for kept in slot.states:
                    kept.n_rows, before = kept.position - before, kept.position

    def _refer(self, slot: Slot, states: tuple[KeptState, ...]) -> None:
        """Let a slot refer to these states; who has no users is dropped."""
        for kept in states:
            kept.users += 1
        for kept in slot.states:
            kept.users -= 1
            if not kept.users:
                del self._kept[kept]
                self._dropped.append(kept.state)
        slot.states = states

    def _use(self, kept: KeptState | None) -> None:
        self._uses += 1
        if kept is not None:
            kept.used_at = self._uses

    def _continue(self, prefix: Prefix, n_blocks: int, room_beside: int) -> Start | None:
        slot, n_kept = prefix.slot, prefix.n_kept
        shared = slot.shared[: settled_blocks(n_kept)]
        if prefix.state is not None and self.kept_window is not None:
            shared = slot.shared[: self._shareable(n_kept, prefix.state)]
        n_freed = [block.users for block in slot.shared[len(shared) :]].count(1)
        n_own = slot.n_blocks - len(slot.shared) + n_freed
        more = n_blocks - len(shared) - n_own
        if more > room_beside:
            return None
        slot.is_warm = False
        self._rewind(slot, n_kept)
        if prefix.state is not None and self.kept_window is not None:
            slot.n_written = n_kept + REWIND_ROWS
        self._use(prefix.state)
        given_up = self._make_room(more)
        self._evict(0)
        self._book(slot, n_blocks, shared)
        return Start(slot=slot, n_kept=n_kept, state=prefix.state_id, given_up=given_up)

    def _rewind(self, slot: Slot, n_kept: int) -> None:
        slot.n_chunked = min(slot.n_chunked, n_kept)
        slot.n_answered = min(slot.n_answered, n_kept)
        self._refer(slot, tuple(kept for kept in slot.states if kept.position <= n_kept))

    def _make_room(self, n_blocks: int, *, spare: Slot | None = None) -> tuple[Slot, ...]:
        """Drop warm slots until `n_blocks` more are free; return those dropped."""
        given_up = []
        for slot in self.warm():
            if self._has_room(n_blocks):
                break
            if slot is not spare:
                self.drop(slot)
                given_up.append(slot)
        assert self._has_room(n_blocks)
        return tuple(given_up)

    def _has_room(self, n_blocks: int) -> bool:
        return self.room_blocks - self._booked >= n_blocks

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
