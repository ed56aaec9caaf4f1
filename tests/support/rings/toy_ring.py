"""A ring that computes in integers: its slots hold the tokens whose keys a real one would hold.

Its "model" makes the next token from all tokens before, so that whatever a slot holds wrongly
shows in the text. It checks every promise that stages rely on. Of steps that fail it has no keys.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardnet.errors import ShardnetError
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    ALONE,
    Company,
    Instruction,
    OperateSlot,
    Outcome,
    SendStep,
    SequenceFailed,
    SequenceFinished,
    TokenSampled,
)
from shardnet.slot_operations import (
    CloseSequence,
    DropStates,
    FreeSlot,
    KeepState,
    OpenSequence,
    SlotOperation,
)
from shardnet.types import (
    BLOCK_POSITIONS,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StateId,
    StepId,
    blocks_for,
    settled_blocks,
)

Operation = TypeVar("Operation", OpenSequence, CloseSequence, FreeSlot)

VOCABULARY = 12
STOP_ID = 3
HOLE = -1
"""In place of a token whose key was not computed."""


def next_token(tokens: Sequence[int]) -> int:
    """What the toy model says after `tokens`."""
    try:
        text = bytes(tokens)
    except ValueError:  # rare, and slow
        text = bytes(token % 256 for token in tokens)
    digest = hashlib.blake2b(text, digest_size=2).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def text_of(
    prompt: Sequence[int], max_tokens: int, context: int, *, stop: bool = False
) -> list[int]:
    """What a sequence becomes when it runs alone."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, context):
        tokens.append(next_token(tokens))
        if stop and tokens[-1] == STOP_ID:
            break
    return tokens[len(prompt) :]


@dataclass
class Oracle:
    """A drafter that knows the text, and errs on every `errs`-th token; 0 never."""

    errs: int = 0
    most: int = 31
    learned: list[tuple[int, int]] = field(default_factory=list)

    def prepare(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        n_frames: int = 1,
        company: Company = ALONE,
    ) -> list[int]:
        start = [*tokens, *(ahead or ())]
        guessed = [*start]
        for _ in range(min(limit, self.most)):
            right = next_token(guessed)
            is_error = self.errs and (len(guessed) % self.errs == 0)
            guessed.append(right + 1 if is_error else right)
        return guessed[len(start) :]

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        self.learned.append((n_proposed, n_accepted))


@dataclass(slots=True)
class ToySlot:
    """The tokens of each position, and who owns the slot."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[object] = field(default_factory=list)
    owner: SequenceId | None = None

    def trim(self, n_positions: int) -> None:
        """Keep so many positions. A block that is not whole any more is its own from now on."""
        assert n_positions <= len(self.tokens), "positions were never computed"
        if n_positions < len(self.tokens):
            del self.blocks[settled_blocks(n_positions) :]
        del self.tokens[n_positions:]
        self.grow(n_positions)

    def grow(self, n_positions: int) -> None:
        del self.blocks[blocks_for(n_positions) :]
        self.blocks += [object() for _ in range(blocks_for(n_positions) - len(self.blocks))]


@dataclass(slots=True)
class ToyStage:
    """A stage's slots, changed in data order. `next_token` is what its model says.

    With a `window` it keeps the rows that this reaches with a state, and the tokens before it.
    """

    room_blocks: int
    shares: bool = False
    window: int | None = None
    slots: dict[SlotId, ToySlot] = field(default_factory=dict)
    kept: dict[StateId, list[int]] = field(default_factory=dict)
    next_token: Callable[[Sequence[int]], int] = next_token

    @property
    def n_blocks(self) -> int:
        return len({id(block) for slot in self.slots.values() for block in slot.blocks})

    def carry_out(self, operation: SlotOperation) -> None:
        match operation:
            case OpenSequence(slot=slot, source=None):
                held = self.slots.setdefault(slot, ToySlot())
                assert held.owner is None
                held.trim(operation.n_kept)
                if operation.state is not None:
                    assert self.kept[operation.state] == held.tokens
                    if self.window is not None:
                        del held.blocks[self._n_shared(operation) :]
                        held.grow(operation.n_kept)
                held.owner = operation.sequence_id
            case OpenSequence(slot=slot, source=source):
                assert slot not in self.slots
                assert source is not None
                kept = self.slots[source].tokens[: operation.n_kept]
                assert len(kept) == operation.n_kept
                assert operation.state is None or self.kept[operation.state] == kept
                n_shared = self._n_shared(operation) if self.shares else 0
                blocks = self.slots[source].blocks[:n_shared]
                self.slots[slot] = ToySlot(kept, blocks, operation.sequence_id)
                self.slots[slot].grow(len(kept))
            case CloseSequence(slot=slot):
                held = self.slots[slot]
                assert held.owner == operation.sequence_id
                held.owner = None
                held.trim(operation.n_kept)
                if not operation.n_kept:
                    del self.slots[slot]
            case FreeSlot(slot=slot):
                assert self.slots.pop(slot).owner is None
            case KeepState(slot=slot, n_positions=n_positions, state=state):
                assert state not in self.kept
                assert n_positions <= len(self.slots[slot].tokens)
                self.kept[state] = self.slots[slot].tokens[:n_positions]
            case DropStates(states=states):
                for state in states:
                    del self.kept[state]
        assert self.n_blocks <= self.room_blocks

    def _n_shared(self, opened: OpenSequence) -> int:
        n_shared = settled_blocks(opened.n_kept)
        if opened.state is None or self.window is None:
            return n_shared
        return min(n_shared, max(0, opened.n_kept - self.window + 1) // BLOCK_POSITIONS)

    def compute(self, batch: MicroBatch, *, fails: bool = False) -> list[int]:
        """Take the rows in, or holes if it `fails`, and sample those that are to be sampled."""
        sampled: list[int] = []
        ids = iter([HOLE] * batch.n_rows if fails else batch.token_ids)
        for group in batch.groups:
            held = self.slots[group.slot]
            assert held.owner == group.sequence_id
            assert group.position <= len(held.tokens), "a position was left out"
            end = group.position + group.n_rows
            held.grow(max(end, len(held.tokens)))
            written = {id(b) for b in held.blocks[settled_blocks(group.position) :]}
            others = (other for other in self.slots.values() if other is not held)
            assert not written & {id(b) for other in others for b in other.blocks}
            for position in range(group.position, end):
                held.tokens[position : position + 1] = [next(ids)]
                if position >= end - group.n_sampled:
                    sampled.append(self.next_token(held.tokens[: position + 1]))
        assert self.n_blocks <= self.room_blocks
        return sampled


@dataclass(slots=True)
class ToyRing:
    """A scheduler, the ring it drives and the clients' view. Answers come in order of the steps."""

    scheduler: Scheduler
    stage: ToyStage = field(init=False)
    in_flight: deque[tuple[MicroBatch, list[int] | ShardnetError]] = field(default_factory=deque)
    failing: dict[StepId, ShardnetError] = field(default_factory=dict)
    """The steps that fail once they are sent, and with what."""
    sent: list[SendStep] = field(default_factory=list)
    said: dict[SequenceId, list[int]] = field(default_factory=dict)
    ended: Counter[SequenceId] = field(default_factory=Counter)
    finished: set[SequenceId] = field(default_factory=set)
    paused: Counter[SequenceId] = field(default_factory=Counter)
    instructions: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stage = ToyStage(self.scheduler.ring.room_blocks, self.scheduler.ring.shares_blocks)

    def operations(self, kind: type[Operation]) -> list[Operation]:
        """The slot operations of one kind, in order."""
        told = (i.operation for i in self.instructions if isinstance(i, OperateSlot))
        return [operation for operation in told if isinstance(operation, kind)]

    def pump(self) -> list[SendStep]:
        """Carry out everything that the scheduler wants sent. Returns the steps."""
        steps = []
        for instruction in self.scheduler.next_instructions():
            self.instructions.append(instruction)
            if isinstance(instruction, SendStep):
                steps.append(instruction)
                batch = instruction.batch
                assert len(batch.token_ids) == batch.n_rows > 0
                error = self.failing.get(batch.step)
                sampled = self.stage.compute(batch, fails=error is not None)
                self.in_flight.append((batch, error or sampled))
            else:
                assert isinstance(instruction, OperateSlot)
                operation = instruction.operation
                self.stage.carry_out(operation)
                if isinstance(operation, CloseSequence) and instruction.is_pause:
                    self.paused[operation.sequence_id] += 1
        self.sent += steps
        assert len(self.in_flight) <= self.scheduler.max_in_flight
        n_booked = self.scheduler.queue.kv_blocks.booked_blocks
        assert self.stage.n_blocks <= n_booked <= self.stage.room_blocks
        return steps

    def answer(self) -> list[Outcome]:
        """Let the oldest step come round."""
        batch, sampled = self.in_flight.popleft()
        if isinstance(sampled, ShardnetError):
            return self.take(self.scheduler.on_step_failed(batch.step, sampled))
        return self.take(self.scheduler.on_tokens(batch.step, sampled))

    def take(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            assert not self.ended[outcome.sequence_id], "news of a sequence that has ended"
            match outcome:
                case TokenSampled(sequence_id=sequence_id, token_id=token_id):
                    self.said.setdefault(sequence_id, []).append(token_id)
                case SequenceFinished(sequence_id=sequence_id):
                    self.ended[sequence_id] += 1
                    self.finished.add(sequence_id)
                case SequenceFailed(sequence_id=sequence_id):
                    self.ended[sequence_id] += 1
        return outcomes

    def run(self, limit: int = 100_000) -> None:
        """Go on until nothing is in flight."""
        self.pump()
        for _ in range(limit):
            if not self.in_flight:
                return
            self.answer()
            self.pump()
        raise AssertionError(f"steps without an end: {self.scheduler.n_active} are left")

    def groups(self) -> list[RowGroup]:
        """All row groups sent so far."""
        return [group for step in self.sent for group in step.batch.groups]
