"""The scheduler: which rows travel next. Pure.

Knows sequences, slots, KV blocks, positions and the steps in flight. It takes events (a request,
an answered step, a cancellation) and returns instructions and outcomes. It must not know time,
tensors, tokens' text, sockets or asyncio: the engine around it carries its instructions out.

Rules it keeps (design decisions 1, 2, 4, 7):

- at most `2 x n_stages` steps are in flight, so every queue of the ring is bounded;
- prompt chunks end at multiples of `PREFILL_CHUNK_ROWS` counted from position 0, whatever the ring;
- prefill rows and decode rows never share a micro-batch;
- the KV room of a sequence's longest possible life is booked before its first row is sent, so
  no stage ever runs out in the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardnet.errors import CapacityError, LocalProtocolError, ShardnetError, UsageError
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    Epoch,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    blocks_for,
)


class FinishReason(Enum):
    """Why a sequence ended on its own."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One prompt to continue. `stop_ids` end it, the id itself included in its tokens."""

    sequence_id: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStep:
    """Send these rows round the ring."""

    batch: MicroBatch
    is_decode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """Tell every stage, in data order, that the sequence now owns the slot."""

    sequence_id: SequenceId
    slot: SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSlot:
    """Tell every stage, in data order, to free the slot."""

    sequence_id: SequenceId
    slot: SlotId


Instruction = SendStep | OpenSlot | CloseSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampled:
    """The ring sampled the next token of a sequence. `row` is its place in the token frame."""

    sequence_id: SequenceId
    token_id: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """A sequence ended; no further event names it."""

    sequence_id: SequenceId
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailed:
    """A sequence failed; no further event names it."""

    sequence_id: SequenceId
    error: ShardnetError


Outcome = TokenSampled | SequenceFinished | SequenceFailed


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A running sequence. `n_sent` positions have been sent; `tokens` holds prompt and output."""

    request: SequenceRequest
    slot: SlotId
    n_blocks: int
    tokens: list[int]
    n_sent: int = 0
    awaits_token: bool = False

    @property
    def is_prefilling(self) -> bool:
        return self.n_sent < len(self.request.prompt)

    @property
    def is_ready_to_decode(self) -> bool:
        return not self.is_prefilling and not self.awaits_token

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Sequences of one ring.

    `room_blocks` is the smallest KV room of its stages, `context` bounds one sequence, `max_slots`
    the sequences that run at once.
    """

    epoch: Epoch
    n_stages: int
    room_blocks: int
    context: int
    max_slots: int
    chunk_rows: int = PREFILL_CHUNK_ROWS
    _waiting: deque[SequenceRequest] = field(default_factory=deque)
    _running: dict[SequenceId, _Sequence] = field(default_factory=dict)
    _steps: dict[StepId, tuple[RowGroup, ...]] = field(default_factory=dict)
    _closing: list[CloseSlot] = field(default_factory=list)
    _free_slots: list[SlotId] = field(default_factory=list)
    _next_slot: int = 0
    _next_step: int = 1
    _booked_blocks: int = 0

    @property
    def max_in_flight(self) -> int:
        """Steps that may be in flight: the credit of the ring."""
        return 2 * self.n_stages

    @property
    def booked_blocks(self) -> int:
        """KV blocks booked on every stage."""
        return self._booked_blocks

    @property
    def n_active(self) -> int:
        """Sequences waiting or running."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises UsageError for an empty prompt or no tokens to make, CapacityError when the request
        could never fit: its prompt fills the context, or its life outgrows the whole KV room.
        """
        n_prompt = len(request.prompt)
        if n_prompt == 0:
            raise UsageError("the prompt is empty and the model adds no bos token: give some text")
        if request.max_tokens < 1:
            raise UsageError(f"max-tokens must be 1 or more, not {request.max_tokens}")
        if n_prompt >= self.context:
            raise CapacityError(
                f"the prompt has {n_prompt} tokens and the context holds {self.context}: "
                "shorten the prompt or raise --context"
            )
        needed = blocks_for(self._longest_life(request))
        if needed > self.room_blocks:
            raise CapacityError(
                f"the request may grow to {self._longest_life(request)} positions ({needed} KV "
                f"blocks) and the ring has room for {self.room_blocks}: lower --max-tokens, or "
                "give the nodes more --memory"
            )
        self._waiting.append(request)

    def next_instructions(self) -> list[Instruction]:
        """Return, in order, everything that may be sent now."""
        instructions: list[Instruction] = list(self._closing)
        self._closing.clear()
        instructions += self._admit()
        while len(self._steps) < self.max_in_flight:
            step = self._next_prefill() or self._next_decode()
            if step is None:
                break
            instructions.append(step)
        return instructions

    def on_tokens(self, step: StepId, token_ids: Sequence[int]) -> list[Outcome]:
        """Take the answer of a step.

        Raises LocalProtocolError when the step is not in flight or the number of ids is wrong:
        the pipeline checks both at its edge.
        """
        groups = self._take_step(step)
        if sum(group.n_sampled for group in groups) != len(token_ids):
            raise LocalProtocolError(f"step {step} was answered with {len(token_ids)} tokens")
        outcomes: list[Outcome] = []
        row = 0
        for group in groups:
            for _ in range(group.n_sampled):
                outcomes += self._token(group.sequence_id, token_ids[row], row)
                row += 1
        return outcomes

    def on_step_failed(self, step: StepId, error: ShardnetError) -> list[Outcome]:
        """Take a step that a stage could not compute: its sequences fail, the others go on."""
        outcomes: list[Outcome] = []
        for group in self._take_step(step):
            if group.sequence_id in self._running:
                self._end(self._running[group.sequence_id])
                outcomes.append(SequenceFailed(sequence_id=group.sequence_id, error=error))
        return outcomes

    def end(self, sequence_id: SequenceId) -> bool:
        """End a sequence from outside (stop string, cancellation). False when it has ended."""
        if sequence_id in self._running:
            self._end(self._running[sequence_id])
            return True
        for request in self._waiting:
            if request.sequence_id == sequence_id:
                self._waiting.remove(request)
                return True
        return False

    def _longest_life(self, request: SequenceRequest) -> int:
        return min(len(request.prompt) + request.max_tokens, self.context)

    def _admit(self) -> Iterable[Instruction]:
        """Give slots to waiting requests in order of arrival while room and slots last."""
        while self._waiting and len(self._running) < self.max_slots:
            request = self._waiting[0]
            n_blocks = blocks_for(self._longest_life(request))
            if self._booked_blocks + n_blocks > self.room_blocks:
                return
            self._waiting.popleft()
            self._booked_blocks += n_blocks
            slot = self._take_slot()
            self._running[request.sequence_id] = _Sequence(
                request=request, slot=slot, n_blocks=n_blocks, tokens=list(request.prompt)
            )
            yield OpenSlot(sequence_id=request.sequence_id, slot=slot)

    def _take_slot(self) -> SlotId:
        if self._free_slots:
            return self._free_slots.pop()
        self._next_slot += 1
        return SlotId(self._next_slot - 1)

    def _next_prefill(self) -> SendStep | None:
        """Take the next chunk of the oldest sequence whose prompt is not all sent."""
        for sequence in self._running.values():
            if sequence.is_prefilling:
                n_prompt = len(sequence.request.prompt)
                start = sequence.n_sent
                end = min((start // self.chunk_rows + 1) * self.chunk_rows, n_prompt)
                sequence.awaits_token = end == n_prompt
                return self._step([(sequence, end - start)], is_decode=False)
        return None

    def _next_decode(self) -> SendStep | None:
        """Take one row each of ready sequences.

        A ring of n stages works best on n micro-batches, so a step takes a n-th of the running
        sequences at most.
        """
        ready = [s for s in self._running.values() if s.is_ready_to_decode]
        if not ready:
            return None
        share = -(-len(self._running) // self.n_stages)
        for sequence in ready[:share]:
            sequence.awaits_token = True
        return self._step([(sequence, 1) for sequence in ready[:share]], is_decode=True)

    def _step(self, rows: list[tuple[_Sequence, int]], *, is_decode: bool) -> SendStep:
        groups = []
        token_ids: list[int] = []
        for sequence, n_rows in rows:
            position = sequence.n_sent
            groups.append(
                RowGroup(
                    sequence_id=sequence.request.sequence_id,
                    slot=sequence.slot,
                    position=position,
                    n_rows=n_rows,
                    n_sampled=int(sequence.awaits_token),
                )
            )
            token_ids += sequence.tokens[position : position + n_rows]
            sequence.n_sent += n_rows
        step = StepId(self._next_step)
        self._next_step += 1
        batch = MicroBatch(epoch=self.epoch, step=step, groups=tuple(groups), token_ids=token_ids)
        self._steps[step] = batch.groups
        return SendStep(batch=batch, is_decode=is_decode)

    def _take_step(self, step: StepId) -> tuple[RowGroup, ...]:
        if step not in self._steps:
            raise LocalProtocolError(f"step {step} is not in flight")
        return self._steps.pop(step)

    def _token(self, sequence_id: SequenceId, token_id: int, row: int) -> Iterable[Outcome]:
        sequence = self._running.get(sequence_id)
        if sequence is None:  # it ended while this step was under way
            return
        sequence.tokens.append(token_id)
        sequence.awaits_token = False
        yield TokenSampled(sequence_id=sequence_id, token_id=token_id, row=row)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._end(sequence)
            yield SequenceFinished(sequence_id=sequence_id, reason=reason)

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in sequence.request.stop_ids:
            return FinishReason.STOP
        is_full = len(sequence.tokens) >= self.context
        if is_full or sequence.n_generated >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, sequence: _Sequence) -> None:
        """Free what a sequence holds. Steps of it still in flight reach the stages before this."""
        del self._running[sequence.request.sequence_id]
        self._booked_blocks -= sequence.n_blocks
        self._free_slots.append(sequence.slot)
        self._closing.append(
            CloseSlot(sequence_id=sequence.request.sequence_id, slot=sequence.slot)
        )
