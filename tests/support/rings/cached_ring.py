"""A ring that computes digests, each stage in a KV cache of its own and as late as one likes.

A stage has a layer of rows, maybe one with a window and one with a state. The key of a position,
and the state behind it, is a digest of all tokens up to it; beside the cache stand the tokens that
the slot must hold. Rows or states of another prefix show at the first row that goes on from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from support.rings.changing_ring import pull
from support.rings.toy_ring import HOLE, ToyRing, ToySlot, ToyStage

from shardnet.errors import CapacityError, ShardnetError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import StateShape
from shardnet.runtime.scheduling.kv_block_manager import block_keys
from shardnet.runtime.scheduling.sequences import (
    ComputedSequence,
    Instruction,
    OperateSlot,
    Outcome,
    RestorePrefix,
    SendStep,
)
from shardnet.slot_operations import (
    CloseSequence,
    DropStates,
    FreeSlot,
    KeepState,
    OpenSequence,
    SlotOperation,
    StoredState,
)
from shardnet.stage.moves.slot_moves import HeldLayer, SlotMoves
from shardnet.types import (
    BLOCK_POSITIONS,
    LIVE_STATES,
    Epoch,
    LayerRange,
    MicroBatch,
    SequenceId,
    SlotId,
    StateId,
    StepId,
)

LAYERS = LayerRange(0, 3)
WINDOW = 100
STATE = StateShape(recent=(1, 1), recurrent=(1, 1, 1))
_PRIME = 1048573
"""Digests are below it, and so float32 holds them."""


@cache
def _powers(base: int, n: int) -> NDArray[np.int64]:
    return np.array([pow(base, place, _PRIME) for place in range(n)])


def digests(tokens: Sequence[int], before: int = 0) -> list[int]:
    """Digest the first token, the first two, and so on, behind those with the digest `before`.

    Each is 31 times the one before it, and the token and 2, modulo a prime.
    """
    n = len(tokens)
    up, down = _powers(31, 8192)[:n], _powers(pow(31, -1, _PRIME), 8192)[:n]
    sums = np.cumsum((np.array(tokens, np.int64) + 2) * down % _PRIME) + before * 31
    made: list[int] = (sums % _PRIME * up % _PRIME).tolist()
    return made


@dataclass
class CachedStage(ToyStage):
    """A stage of a ring with these kinds of layers. `disk` has the tokens that a key stands for.

    What `arrived` for a sequence was read from disk, or moved here from a stage that is gone.
    """

    has_window: bool = False
    keeps_state: bool = False
    disk: dict[bytes, list[int]] = field(default_factory=dict)
    states_on_disk: set[bytes] = field(default_factory=set)
    arrived: dict[SequenceId, list[int]] = field(default_factory=dict)
    owners: dict[SlotId, OpenSequence] = field(default_factory=dict)
    cache: KvCache = field(init=False)
    moves: SlotMoves = field(init=False)

    def __post_init__(self) -> None:
        self.cache = KvCache(
            *(3, 1, 1, torch.float32, torch.device("cpu"), self.room_blocks),
            windows=(None, WINDOW if self.has_window else None, None),
            states=(None, None, STATE if self.keeps_state else None),
        )
        self.moves = SlotMoves(self.cache, LAYERS, self.owners)
        self.shares = self.cache.shares
        self.window = WINDOW if self.has_window and self.shares else None

    def carry_out(self, operation: SlotOperation) -> None:
        """Change the tokens and the cache of a slot, and compare them."""
        match operation:
            case OpenSequence(sequence_id=sequence_id, slot=slot, is_restored=True):
                assert slot not in self.slots
                self.slots[slot] = ToySlot(tokens=self.arrived.pop(sequence_id))
                self.owners[slot] = operation
                super().carry_out(operation)
                if self.moves.has(sequence_id):
                    self.moves.adopt(sequence_id, slot, operation.n_kept)
                    self._compare(slot)
                else:
                    self._adopt(slot)
            case OpenSequence(slot=slot, n_kept=n_kept, source=source, state=state):
                super().carry_out(operation)
                self._keep(slot, n_kept, source, state)
                self.owners[slot] = operation
            case CloseSequence(slot=slot, n_kept=n_kept, stored=stored, stored_states=states):
                super().carry_out(operation)
                del self.owners[slot]
                self._keep(slot, n_kept, None)
                self._store(slot, n_kept, stored, states)
                self.cache.rest(slot)
            case KeepState(slot=slot, n_positions=n_positions, state=state):
                super().carry_out(operation)
                self.cache.keep_state(slot, n_positions, state)
            case DropStates(states=states):
                super().carry_out(operation)
                self.cache.drop_states(states)
            case FreeSlot(slot=slot):
                super().carry_out(operation)
                self._keep(slot, 0, None)

    def compute(self, batch: MicroBatch, *, fails: bool = False) -> list[int]:
        """Have the rows in the cache too. Each goes on from what the cache has of its slot."""
        sampled = super().compute(batch, fails=fails)
        for group in batch.groups:
            end = group.position + group.n_rows
            self.cache.ensure(group.slot, end, group.n_rows)
            self._write(group.slot, group.position, end, n_drafts=group.n_drafts)
        for group in batch.groups:
            self._compare(group.slot, group.position + group.n_rows)
        return sampled

    def has_all_of(self, slot: SlotId, tokens: Sequence[int]) -> bool:
        """Whether a slot can be moved from here with these tokens."""
        self._compare(slot, len(tokens))
        return self.slots[slot].tokens[: len(tokens)] == [*tokens]

    @property
    def _windows(self) -> Sequence[int | None]:
        """Those of the layers that have rows."""
        return self.cache.windows[: 2 if self.keeps_state else 3]

    def _keep(
        self, slot: SlotId, n_positions: int, source: SlotId | None, state: StateId | None = None
    ) -> None:
        """Keep the first positions of a slot, its own or copied, as TorchCompute does."""
        if source is not None or state is not None:
            self.cache.copy(slot if source is None else source, slot, n_positions, state)
        self.cache.trim(slot, n_positions)
        self._compare(slot)

    def _adopt(self, slot: SlotId) -> None:
        """Let the cache have what arrived: of a window no more than the next row attends to."""
        n_blocks, end = len(self.slots[slot].blocks), len(self.slots[slot].tokens)
        contents = self.cache.new_contents(0)
        for layer, window in enumerate(self._windows):
            first = max(0, end - window + 1) // BLOCK_POSITIONS * BLOCK_POSITIONS if window else 0
            rows = self.cache.new_rows(layer, n_blocks * BLOCK_POSITIONS - first)
            contents.keys[layer], contents.values[layer] = rows
            contents.firsts[layer] = first
        self.cache.adopt(slot, contents, n_blocks)
        self._write(slot, 0, end, n_drafts=0)
        self._compare(slot)

    def _store(
        self, slot: SlotId, n_kept: int, keys: Sequence[bytes], states: Sequence[StoredState]
    ) -> None:
        """Write whole blocks: what a key stands for was answered, and is the same always.

        A prompt begins behind those alone whose states are written too.
        """
        for each in states:
            assert self.kept[each.state] == self.slots[slot].tokens[: each.n_blocks * 256]
            self.states_on_disk.add(keys[each.n_blocks - 1])
        held = self.slots[slot].tokens if n_kept else []
        assert HOLE not in held, "what is kept was never answered"
        for block, key in enumerate(keys[: n_kept // BLOCK_POSITIONS], start=1):
            tokens = held[: block * BLOCK_POSITIONS]
            assert self.disk.setdefault(key, tokens) == tokens

    def _write(self, slot: SlotId, position: int, end: int, n_drafts: int) -> None:
        """Write rows, and have the state go on from what it is."""
        tokens = self.slots[slot].tokens[:end]
        made = digests(tokens)
        for layer in range(len(self._windows)):
            (keys, _), first = self.cache.own(slot, layer)
            begin = max(position, first)
            keys[0, begin - first : end - first, 0] = torch.tensor(made[begin:end])
        if not self.keeps_state:
            return
        state = self.cache.state(slot, 2)

        def replay(source: SlotState, target: SlotState, n_rows: int) -> None:
            rows = tokens[position : position + n_rows]
            for part in ("recurrent", "recent"):
                before = int(getattr(source, part).item())
                getattr(target, part).fill_(digests(rows, before)[-1])

        before = state.keep_before(end - position, n_drafts)
        replay(before, state, end - position)
        state.count(end - position, replay if state.kept else None)

    def _compare(self, slot: SlotId, end: int | None = None) -> None:
        """Check that the next row would find in the cache what the slot must hold."""
        assert self.cache.blocks_used == self.n_blocks <= self.room_blocks
        held = self.slots.get(slot)
        end = (len(held.tokens) if held else 0) if end is None else end
        if not held or not end:
            return
        made = torch.tensor(digests(held.tokens[:end]))
        contents = self.cache.contents(slot)
        for layer, window in enumerate(self._windows):
            begin = max(0, end - window + 1) if window is not None else 0
            assert contents.first(layer) <= begin
            assert torch.equal(contents.rows(layer, begin, end)[0, :, 0], made[begin:])
        for state in contents.states.values() if held.owner is not None else ():
            known = state.at(end)
            assert known is not None, f"no state after {end} positions"
            assert known.recurrent.item() == known.recent.item() == made[-1]


@dataclass
class LateRing(ToyRing):
    """A ring of `n_stages` such stages, each with instructions that it has not come to.

    A `standby` follows one of them: it has brought what is `followed`. Of the round under way these
    layers are `coming`.
    """

    has_window: bool = False
    keeps_state: bool = False
    stages: list[CachedStage] = field(default_factory=list)
    todo: list[deque[Instruction]] = field(default_factory=list)
    sampled: dict[StepId, list[int]] = field(default_factory=dict)
    restoring: deque[RestorePrefix] = field(default_factory=deque)
    standby: CachedStage = field(init=False)
    lost: int = 0
    followed: dict[SequenceId, ComputedSequence] = field(default_factory=dict)
    coming: deque[tuple[ComputedSequence, HeldLayer]] = field(default_factory=deque)
    n_followed: int = 0
    """Sequences that went on with what was followed."""

    def __post_init__(self) -> None:
        self._new_stages()

    def _new_stages(self) -> None:
        ring = self.scheduler.ring
        self.todo = [deque() for _ in range(ring.n_stages)]
        disks = [(stage.disk, stage.states_on_disk) for stage in self.stages] or [
            ({}, set()) for _ in self.todo
        ]
        self.stages = [
            CachedStage(
                ring.room_blocks,
                has_window=self.has_window,
                keeps_state=self.keeps_state,
                disk=disk,
                states_on_disk=states,
            )
            for disk, states in disks
        ]
        self.stage = self.stages[-1]
        self.standby = self._new_stage(self.stage)
        self.followed.clear()
        self.coming.clear()

    def _new_stage(self, like: CachedStage) -> CachedStage:
        return replace(like, slots={}, kept={}, arrived={}, owners={})

    def n_stored(self, prompt: Sequence[int]) -> int:
        """How many positions of a prompt all stages have on disk."""
        assert self.scheduler.ring.prefix_seed is not None
        keys = block_keys(self.scheduler.ring.prefix_seed, prompt, len(prompt) - 1)
        have = [all(key in stage.disk for stage in self.stages) for key in keys]
        n_blocks = have.index(False) if False in have else len(have)
        while self.keeps_state and n_blocks:
            if all(keys[n_blocks - 1] in stage.states_on_disk for stage in self.stages):
                break
            n_blocks -= 1
        return n_blocks * BLOCK_POSITIONS

    def pump(self) -> list[SendStep]:
        """Take what the scheduler wants sent; stages come to it later."""
        steps = []
        for instruction in self.scheduler.next_instructions():
            self.instructions.append(instruction)
            match instruction:
                case RestorePrefix():
                    self.restoring.append(instruction)
                    continue
                case SendStep(batch=batch):
                    steps.append(instruction)
                    self.in_flight.append((batch, []))
                case OperateSlot(operation=CloseSequence(sequence_id=paused), is_pause=True):
                    self.paused[paused] += 1
            for todo in self.todo:
                todo.append(instruction)
        self.sent += steps
        kv = self.scheduler.queue.kv_blocks
        assert len(self.in_flight) <= self.scheduler.max_in_flight
        assert kv.booked_blocks <= kv.room_blocks
        return steps

    def work(self, rank: int, n_instructions: int) -> None:
        """Have a stage carry out some instructions, none that the stage before it has not."""
        ahead = len(self.todo[rank - 1]) if rank else 0
        for _ in range(min(n_instructions, len(self.todo[rank]) - ahead)):
            self._carry_out(rank, self.todo[rank].popleft())

    def _carry_out(self, rank: int, instruction: Instruction) -> None:
        stage, room = self.stages[rank], self.scheduler.ring.room_states
        if isinstance(instruction, SendStep):
            step = instruction.batch.step
            fails = step in self.failing and rank >= step % len(self.stages)
            self.sampled[step] = stage.compute(instruction.batch, fails=fails)
        else:
            assert isinstance(instruction, OperateSlot)
            stage.carry_out(instruction.operation)
            n_live = LIVE_STATES * sum(slot.owner is not None for slot in stage.slots.values())
            assert room is None or n_live + len(stage.kept) <= room

    def answer(self) -> list[Outcome]:
        """Have all stages come to the oldest step, and let it come round."""
        batch, _ = self.in_flight[0]
        for rank, todo in enumerate(self.todo):
            while any(isinstance(each, SendStep) and each.batch is batch for each in todo):
                self.work(rank, 1)
        answer: list[int] | ShardnetError = self.sampled.pop(batch.step)
        self.in_flight[0] = (batch, self.failing.get(batch.step, answer))
        return super().answer()

    def settle(self) -> None:
        """Have all stages come to the end of what was sent."""
        for rank in range(len(self.stages)):
            self.work(rank, len(self.todo[rank]))

    def restore(self, *, finds: bool) -> None:
        """End the oldest reading from disk, of which nothing may come."""
        if not self.restoring:
            return
        wanted = self.restoring.popleft()
        prompts = [
            sequence.tokens
            for sequence in self.scheduler.queue.running.values()
            if sequence.sequence_id == wanted.sequence_id
        ]
        n_found = wanted.n_positions if finds and prompts else 0
        n_found = n_found if n_found <= (self.n_stored(prompts[0]) if prompts else 0) else 0
        for stage in self.stages if n_found else ():
            stage.arrived[wanted.sequence_id] = prompts[0][:n_found]
        self.scheduler.queue.restored(wanted.sequence_id, n_found)

    def follow(self, n_layers: int) -> None:
        """Have the standby bring so many layers: of the round under way, else those of another."""
        if not self.coming:
            states = {one.state for one in self.followed.values() if one.state is not None}
            computed = self.scheduler.queue.to_follow(states)
            known = {key: len(one.token_ids) for key, one in self.followed.items()}
            begun = {*self.standby.moves._arriving}
            for key in begun - {one.sequence_id for one in computed}:
                self._forget(key)
            for one in computed:
                n_known = known.get(one.sequence_id, 0)
                if len(one.token_ids) < n_known:
                    self._forget(one.sequence_id)
                if len(one.token_ids) != n_known:
                    moves = self.stages[self.lost].moves
                    found = moves.look(one.sequence_id, one.slot, len(one.token_ids), one.state)
                    self.coming += [(one, layer) for layer in found.values()]
                    break
        for _ in range(min(n_layers, len(self.coming))):
            one, held = self.coming.popleft()
            try:
                self.standby.moves.begin(one.sequence_id, one.token_ids)
                pull({held.index: held}, self.standby.moves, [held.index], one.sequence_id)
            except (UsageError, CapacityError):  # it has left its slot, or there is no room
                self.coming.clear()
                return
            if not self.coming:
                self.followed[one.sequence_id] = one

    def _forget(self, sequence_id: SequenceId) -> None:
        self.followed.pop(sequence_id, None)
        self.standby.moves.forget(sequence_id)

    def take_over(self) -> None:
        """Lose the stage that is followed: the others are where they are, and go on from there."""
        known = {one.sequence_id: one for one in self.scheduler.computed()}
        former, standby, lost = self.stages, self.standby, self.lost
        followed = {
            key: one
            for key, one in self.followed.items()
            if key in known and len(one.token_ids) <= len(known[key].token_ids)
        }

        def move(stages: list[CachedStage]) -> list[ComputedSequence]:
            stages[lost] = standby
            return [one for one in followed.values() if self._take(former, stages, one)]

        self.n_followed += len(self._put_in_place(move))

    def _take(
        self, former: list[CachedStage], stages: list[CachedStage], one: ComputedSequence
    ) -> bool:
        end = len(one.token_ids)
        assert stages[self.lost].moves.is_whole(one.sequence_id, end)
        for rank, (source, target) in enumerate(zip(former, stages, strict=True)):
            if rank == self.lost:
                continue
            target.moves.begin(one.sequence_id, one.token_ids)
            try:
                found = source.moves.look(one.sequence_id, one.slot, end, one.state)
                for layer, held in found.items():
                    target.moves.take_own(one.sequence_id, layer, held)
            except UsageError:
                return False
        return all(stage.moves.is_whole(one.sequence_id, end) for stage in stages)

    def replace(self, *, moves: bool) -> None:
        """Have another ring in its place, with what is on disk, and with what is moved."""
        while moves and self.in_flight:
            self.answer()
        self.settle()
        computed = self.scheduler.computed() if moves else []
        for each in computed:
            assert all(stage.has_all_of(each.slot, each.token_ids) for stage in self.stages)
        self._put_in_place(lambda _: computed)

    def _put_in_place(
        self, move: Callable[[list[CachedStage]], list[ComputedSequence]]
    ) -> list[ComputedSequence]:
        """Go on over stages that have nothing but what `move` returns, which gives it to them."""
        self.in_flight.clear()
        self.restoring.clear()
        ring, lost = self.scheduler.ring, self.lost
        self.scheduler.suspend()
        self._new_stages()
        self.lost = lost
        moved = move(self.stages)
        self.stage, self.lost = self.stages[-1], (lost + 1) % ring.n_stages
        for stage in self.stages:
            stage.arrived = {one.sequence_id: [*one.token_ids] for one in moved}
        self.scheduler.queue.moved({one.sequence_id: len(one.token_ids) for one in moved})
        assert not self.scheduler.resume(replace(ring, epoch=Epoch(ring.epoch + 1)))
        self.pump()
        self.scheduler.queue.moved({})
        return moved

    def run(self, limit: int = 100_000) -> None:
        """Go on until nothing is in flight, or being read."""
        super().run(limit)
        while self.restoring:
            self.restore(finds=True)
            super().run(limit)
        self.settle()
