"""The roster: who waits, who runs in which slot, who is paused for want of room. Pure.

Knows sequences in their order, slots and KV blocks, and what every stage is to be told of slots
(design decisions 1, 6 and 7). Must not know steps or rows.

- the KV room of rows is booked before they are sent, so no stage ever runs out;
- when running sequences outgrow the room, warm slots are given up, then the youngest is paused;
- a sequence waits while a running prompt will soon hold more of its prefix than any slot does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardnet.errors import BusyError, CapacityError, UsageError
from shardnet.runtime.scheduling.kv_block_manager import Slot, SlotBook, Start, common_prefix
from shardnet.runtime.scheduling.sequences import (
    Instruction,
    LiveSequence,
    OperateSlot,
    SequenceRequest,
)
from shardnet.types import (
    BLOCK_POSITIONS,
    CloseSequence,
    FreeSlot,
    OpenSequence,
    SequenceId,
    SlotId,
    blocks_for,
)


@dataclass(slots=True, kw_only=True)
class Roster:
    """Sequences of one ring; what its fields mean stands at Scheduler.

    `pending` is what the stages are to be told, in data order; the scheduler's steps go there too.
    """

    room_blocks: int
    context: int
    max_slots: int
    max_waiting: int
    window: int | None
    chunk_rows: int
    book: SlotBook = field(init=False)
    waiting: list[LiveSequence] = field(default_factory=list)
    """Who waits or is paused, the next first."""
    running: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    ready: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    """Who of them decodes next, in this order."""
    pending: list[Instruction] = field(default_factory=list)
    _next_order: int = 0

    def __post_init__(self) -> None:
        self.book = SlotBook(room_blocks=self.room_blocks, window=self.window)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises UsageError for an empty prompt, CapacityError when the request could never fit: its
        prompt fills the context, or its life outgrows the whole KV room; BusyError when the queue
        is full.
        """
        n_prompt = len(request.prompt)
        if n_prompt == 0:
            raise UsageError("the prompt is empty and the model adds no bos token: give some text")
        if request.max_tokens < 0:
            raise UsageError(f"max-tokens must be 0 or more, not {request.max_tokens}")
        if n_prompt + min(request.max_tokens, 1) > self.context:
            raise CapacityError(
                f"the prompt has {n_prompt} tokens and the context holds {self.context}: "
                "shorten the prompt or raise --context"
            )
        needed = blocks_for(self.longest_life(request))
        if needed > self.room_blocks:
            raise CapacityError(
                f"the request may grow to {self.longest_life(request)} positions ({needed} KV "
                f"blocks) and the ring has room for {self.room_blocks}: lower --max-tokens, or "
                "give the nodes more --memory"
            )
        if len(self.waiting) >= self.max_waiting:
            raise BusyError(f"{len(self.waiting)} requests wait already: ask again later")
        self._next_order += 1
        self._wait(
            LiveSequence(request=request, order=self._next_order, tokens=list(request.prompt))
        )

    def longest_life(self, request: SequenceRequest) -> int:
        """Return the most positions that a request may come to fill."""
        return min(len(request.prompt) + request.max_tokens, self.context)

    def is_live(self, sequence: LiveSequence) -> bool:
        """Say whether a sequence waits or runs."""
        return self.running.get(sequence.sequence_id) is sequence or sequence in self.waiting

    def _wait(self, sequence: LiveSequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.rank)

    def admit(self, least_rows: int) -> None:
        """Give slots to waiting sequences in their order while room and slots last.

        A prefix that is still computed is worth waiting for from `least_rows` rows on.
        """
        while self.waiting and len(self.running) < self.max_slots:
            sequence = self.waiting[0]
            n_blocks = self._first_blocks(sequence)
            must_wait = sequence.n_in_flight or n_blocks > self.book.available_blocks
            if must_wait or self._prefix_is_coming(sequence, least_rows):
                return
            self.waiting.pop(0)
            self._start(sequence, n_blocks)

    def _first_blocks(self, sequence: LiveSequence) -> int:
        """Blocks to begin with: for what is there, and while others run some to grow into."""
        n_positions = len(sequence.tokens) + (BLOCK_POSITIONS if self.running else 1)
        return blocks_for(min(n_positions, self.longest_life(sequence.request)))

    def _prefix_is_coming(self, sequence: LiveSequence, least_rows: int) -> bool:
        """Whether a running prompt will soon hold that much more of this one than any slot does."""
        if sequence.request.whole_prompt:
            return False
        held = self.book.prefix(sequence.tokens)
        n_held = held.n_kept if held is not None else 0
        wanted = n_held + least_rows
        limit = len(sequence.tokens) - 1
        return any(
            other.is_prefilling and common_prefix(other.tokens, sequence.tokens, wanted) == wanted
            for other in self.running.values()
            if wanted <= min(limit, other.n_prompt)
        )

    def _start(self, sequence: LiveSequence, n_blocks: int) -> None:
        request = sequence.request
        if request.whole_prompt:
            start = self.book.start_empty(n_blocks)
        else:
            only_chunks = self.chunk_rows if request.deterministic else 0
            start = self.book.start(sequence.tokens, n_blocks, chunk_rows=only_chunks)
        self._free(start.given_up)
        slot = sequence.slot = start.slot
        slot.tokens, slot.n_held = sequence.tokens, start.n_kept
        sequence.n_sent = start.n_kept
        self.running[sequence.sequence_id] = sequence
        self.note_ready(sequence)
        self.pending.append(
            OperateSlot(
                operation=_opening(request, slot.slot, start),
                is_resumed=sequence.n_generated > 0,
            )
        )

    def _pause(self, sequence: LiveSequence) -> None:
        """Take a sequence's slot away; it is replayed from its tokens when there is room again."""
        self._leave(sequence, n_kept=0, is_pause=True)
        sequence.n_sent = 0
        self._wait(sequence)

    def end(self, sequence: LiveSequence, *, keep_warm: bool) -> None:
        """End a sequence. Steps of it still in flight reach the stages before what is said here."""
        if self.running.get(sequence.sequence_id) is not sequence:
            self.waiting.remove(sequence)
            return
        assert sequence.slot is not None
        n_held = sequence.slot.n_held if keep_warm else 0
        self._leave(sequence, n_kept=n_held if n_held >= self.book.least_copied else 0)

    def secure_row(self, sequence: LiveSequence) -> bool:
        """Book room for one more row; pause the youngest as long as there is none."""
        while sequence.slot is not None:
            given_up = self.book.grow(sequence.slot, sequence.n_sent + 1)
            if given_up is not None:
                self._free(given_up)
                return True
            self._pause(max(self.running.values(), key=lambda running: running.rank))
        return False

    def note_ready(self, sequence: LiveSequence) -> None:
        """Queue a running sequence for decoding if only its newest token's row is left to send."""
        if sequence.is_ready_to_decode:
            self.ready[sequence.sequence_id] = sequence

    def _leave(self, sequence: LiveSequence, *, n_kept: int, is_pause: bool = False) -> None:
        slot = sequence.slot
        assert slot is not None
        del self.running[sequence.sequence_id]
        self.ready.pop(sequence.sequence_id, None)
        sequence.slot = None
        if n_kept:
            self.book.keep_warm(slot)
        else:
            self.book.drop(slot)
        self.pending.append(
            OperateSlot(
                operation=CloseSequence(
                    sequence_id=sequence.sequence_id, slot=slot.slot, n_kept=n_kept
                ),
                is_pause=is_pause,
            )
        )

    def _free(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.pending.append(OperateSlot(operation=FreeSlot(slot=slot.slot)))


def _opening(request: SequenceRequest, slot: SlotId, start: Start) -> OpenSequence:
    """Tell the stages of a sequence. Its stop ids matter only while they are held back."""
    holds_back = request.sampling.min_tokens > 0
    return OpenSequence(
        sequence_id=request.sequence_id,
        slot=slot,
        sampling=request.sampling,
        n_kept=start.n_kept,
        source=start.source,
        n_prompt=len(request.prompt),
        stop_ids=tuple(sorted(request.stop_ids)) if holds_back else (),
        outputs=request.outputs,
    )
