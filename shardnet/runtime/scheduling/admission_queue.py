"""Admit sequences to slots, pause them when KV room runs out, resume them later. Pure.

Knows the order of sequences, their slots and KV blocks, and the slot operations that every stage
must carry out (design decisions 1, 6 and 7). Must not know steps or rows.

- KV blocks are booked before rows are sent, so no stage runs out of room;
- warm slots keep within their share of the room, so that other programs keep their memory;
- when running sequences outgrow the room, warm slots are freed first, then the youngest sequence is
  paused;
- a sequence waits while a running prompt is about to compute a longer prefix of it than any slot
  holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shardnet.errors import CapacityError, ContextExceededError, QueueFullError, UsageError
from shardnet.runtime.scheduling.drafting import check_drafts
from shardnet.runtime.scheduling.kv_block_manager import (
    KvBlockManager,
    Slot,
    Start,
    block_keys,
    common_prefix,
)
from shardnet.runtime.scheduling.sequences import (
    ComputedSequence,
    EncodePictures,
    Instruction,
    LiveSequence,
    OperateSlot,
    RestorePrefix,
    SequenceFailed,
    SequenceRequest,
)
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.slot_operations import (
    CloseSequence,
    DropStates,
    FreeSlot,
    KeepState,
    OpenSequence,
    SlotOperation,
    StoredState,
    alike_until,
)
from shardnet.types import (
    BLOCK_POSITIONS,
    LEAST_STATES,
    LIVE_STATES,
    PROMPT_TAIL_ROWS,
    STATE_POSITIONS,
    STORED_PREFIX_POSITIONS,
    SequenceId,
    SlotId,
    StateId,
    blocks_for,
)

WARM_CONTEXTS = 4
WARM_SHARE = 0.5
"""Warm slots hold at most so many whole contexts, or this share of the room if that is more.

A stage takes memory for a block when it is written: a small model's room is most of the machine,
and prompts that nobody repeats would come to fill it. So it is with states that are kept.
"""
DRAFT_POSITIONS = 2048
"""The last positions of a prompt whose hidden states a drafter reads."""
_LEAST_KEPT = 8
"""States that can be kept beside those of all sequences that run at once."""
STORED_STATE_POSITIONS = 2048
"""Positions between states on disk, but for the last ones of a prompt."""
_LAST_STORED = 2
_LAST_MESSAGES = 2
"""Ends of a prompt's last messages before which its rows are cut, beside that of the first one."""
_LEAST_APART = 64
"""Rows between two such places at the least: each is a further step."""


def most_warm_blocks(room_blocks: int, context: int) -> int:
    """Return the blocks that warm slots hold at most, of those that there is room for."""
    share = int(room_blocks * WARM_SHARE)
    return min(room_blocks, max(WARM_CONTEXTS * blocks_for(context), share))


def most_kept_states(room_states: int, context: int) -> int:
    """Return the states that are kept at most, of those that there is room for."""
    share = int(room_states * WARM_SHARE)
    return max(LEAST_STATES, WARM_CONTEXTS * context // STATE_POSITIONS, share)


@dataclass(slots=True)
class AdmissionQueue:
    """Waiting and running sequences of one ring.

    `pending` lists the instructions for the stages in data order, the scheduler's steps included.
    """

    ring: RingLimits
    kv_blocks: KvBlockManager = field(init=False)
    waiting: list[LiveSequence] = field(default_factory=list)
    """Waiting and paused sequences, the next to be admitted first."""
    running: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    ready: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    """Running sequences whose newest token can be sent, in the order in which they are."""
    anew: set[SequenceId] = field(default_factory=set)
    """Waiting sequences whose steps in flight say nothing: one before them has failed."""
    pending: list[Instruction] = field(default_factory=list)
    _next_order: int = 0

    def __post_init__(self) -> None:
        self.kv_blocks = self._empty_blocks()

    @property
    def max_slots(self) -> int:
        """Most sequences that run at once."""
        most, room = self.ring.max_slots, self.ring.room_states
        return most if room is None else max(1, min(most, (room - _LEAST_KEPT) // LIVE_STATES))

    def _empty_blocks(self) -> KvBlockManager:
        ring = self.ring
        return KvBlockManager(
            room_blocks=ring.room_blocks,
            most_warm_blocks=most_warm_blocks(ring.room_blocks, ring.context),
            window=ring.window,
            room_states=ring.room_states,
            kept_window=ring.largest_window if ring.shares_blocks else None,
            most_kept_states=most_kept_states(ring.room_states or 0, ring.context),
            shares=ring.shares_blocks,
        )

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises UsageError for an empty prompt, a negative `max_tokens`, or drafts where layers keep
        a state, ContextExceededError if the prompt fills the context, CapacityError if prompt and
        output could never fit the KV room, QueueFullError if `max_waiting` requests wait.
        """
        n_prompt = len(request.prompt)
        if n_prompt == 0:
            raise UsageError(
                "the prompt is empty and the model adds no bos token", remedy="give some text"
            )
        if request.max_tokens < 0:
            raise UsageError(f"max-tokens must be 0 or more, not {request.max_tokens}")
        if request.drafter is not None and not request.n_drafts:
            check_drafts(rewinds=self.ring.rewinds)
        if n_prompt + min(request.max_tokens, 1) > self.ring.context:
            raise ContextExceededError.of(
                f"the prompt has {n_prompt} tokens and the context holds {self.ring.context}",
                n_prompt,
                self.ring.context,
            )
        self._check_room(request)
        if len(self.waiting) >= self.ring.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting already", remedy="ask again later"
            )
        self._next_order += 1
        tokens = [*request.prompt, *request.made]
        self._wait(LiveSequence(request=request, order=self._next_order, tokens=tokens))

    def _check_room(self, request: SequenceRequest) -> None:
        """Raise CapacityError if prompt and output could never fit the KV room."""
        needed = blocks_for(self.longest_life(request))
        if needed > self.ring.room_blocks:
            raise CapacityError(
                f"the request may grow to {self.longest_life(request)} positions ({needed} KV "
                f"blocks) and the ring has room for {self.ring.room_blocks}",
                remedy="lower --max-tokens, or give the nodes more --memory",
            )

    def suspend(self) -> None:
        """Forget all slots: the stages that had them are gone. Who ran waits to be replayed."""
        self.pending.clear()
        self.ready.clear()
        self.anew.clear()
        running, self.running = self.running, {}
        self.waiting += running.values()
        self.waiting.sort(key=lambda waiting: waiting.rank)
        for sequence in self.waiting:
            sequence.lose_slot()
        self.kv_blocks = self._empty_blocks()

    def move(self, ring: RingLimits) -> list[SequenceFailed]:
        """Go on with the room of another ring; end what could never fit it. None may run."""
        self.ring = ring
        self.kv_blocks = self._empty_blocks()
        failed = []
        for sequence in [*self.waiting]:
            try:
                self._check_room(sequence.request)
            except CapacityError as error:
                self.waiting.remove(sequence)
                failed.append(SequenceFailed(sequence_id=sequence.sequence_id, error=error))
        return failed

    def longest_life(self, request: SequenceRequest) -> int:
        """Return the most positions a request can fill: prompt and output within the context."""
        return min(len(request.prompt) + request.max_tokens, self.ring.context)

    def is_live(self, sequence: LiveSequence) -> bool:
        """Say whether a sequence waits or runs."""
        return self.running.get(sequence.sequence_id) is sequence or sequence in self.waiting

    def _wait(self, sequence: LiveSequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.rank)

    def admit(self, least_rows: int) -> None:
        """Give slots to waiting sequences in their order while room and slots last.

        A sequence waits for a prefix that another is computing if that saves `least_rows` rows.
        """
        while self.waiting and len(self.running) < self.max_slots:
            sequence = self.waiting[0]
            is_coming = not sequence.n_moved and self._prefix_is_coming(sequence, least_rows)
            if sequence.n_in_flight or is_coming or not self._start(sequence):
                return
            self.waiting.pop(0)
            self.anew.discard(sequence.sequence_id)

    def _first_blocks(self, sequence: LiveSequence) -> int:
        """Count the blocks to start with: for the tokens so far, plus one to grow into beside
        others.
        """
        n_positions = len(sequence.tokens) + (BLOCK_POSITIONS if self.running else 1)
        return blocks_for(min(n_positions, self.longest_life(sequence.request)))

    def _prefix_is_coming(self, sequence: LiveSequence, least_rows: int) -> bool:
        """Say whether a running prompt will soon hold `least_rows` more of this prefix than any
        slot. Where layers keep a state, it is kept at ends of blocks. To one without pictures none
        counts that waits for its own: that may take minutes.
        """
        if sequence.request.whole_prompt:
            return False
        request = sequence.request
        held = self.kv_blocks.prefix(sequence.tokens, request.adapters, request.pictures)
        n_held = held.n_kept if held is not None else 0
        wanted = n_held + least_rows
        if self.ring.room_states is not None:
            wanted = blocks_for(wanted) * BLOCK_POSITIONS
        limit = len(sequence.tokens) - 1
        return any(
            other.is_prefilling and common_prefix(other.tokens, sequence.tokens, wanted) == wanted
            for other in self.running.values()
            if wanted <= min(limit, other.n_prompt)
            and not (other.is_encoding and not request.pictures)
            and other.request.adapters == request.adapters
            and (alike_until(other.request.pictures, request.pictures) or wanted) >= wanted
        )

    def _start(self, sequence: LiveSequence) -> bool:
        """Give a sequence a slot; return False, and nothing changed, where there is no room."""
        request, n_blocks = sequence.request, self._first_blocks(sequence)
        is_room = n_blocks <= self.kv_blocks.available_blocks
        if sequence.n_moved:
            if is_room:
                self._start_moved(sequence, n_blocks)
            return is_room
        if is_room and self._restores(sequence):
            self._start_restoring(sequence, n_blocks)
            return True
        if request.whole_prompt:
            start = self.kv_blocks.start_empty(n_blocks) if is_room else None
        else:
            only_chunks = self.ring.limits.chunk_rows if request.deterministic else 0
            start = self.kv_blocks.start(
                sequence.tokens,
                n_blocks,
                request.adapters,
                request.pictures,
                chunk_rows=only_chunks,
            )
        if start is not None:
            self._free(start.given_up)
            self._open(sequence, start)
        return start is not None

    def _start_moved(self, sequence: LiveSequence, n_blocks: int) -> None:
        n_moved, sequence.n_moved = sequence.n_moved, 0
        start = self.kv_blocks.start_empty(n_blocks)
        self._free(start.given_up)
        self.kv_blocks.restored(start.slot, n_moved)
        self._open(sequence, Start(slot=start.slot, n_kept=n_moved, is_restored=True))

    def to_follow(self, besides: Collection[StateId]) -> list[ComputedSequence]:
        """List what others can bring of running sequences while these go on.

        The states that they end with, and those of `besides`, are kept until this is asked again.
        """
        kv, found = self.kv_blocks, []
        for sequence in self.running.values():
            one, slot = sequence.computed, sequence.slot
            if one is None or slot is None:
                continue
            n_answered, is_prefilling = len(one.token_ids), sequence.is_prefilling
            kept = kv.to_follow(slot, n_answered, is_prefilling=is_prefilling)
            if kept is not None:
                found.append(one.cut(kept.position, kept.state))
            elif kv.room_states is None:
                found.append(one)
        states = {one.state for one in found if one.state is not None}
        kv.followed = frozenset(states.union(besides))
        return found

    def moved(self, n_positions: Mapping[SequenceId, int]) -> None:
        """Note what waiting sequences have on every stage of the next ring, of all others nothing.

        It is taken into slots by those that run at once.
        """
        for sequence in self.waiting:
            sequence.n_moved = n_positions.get(sequence.sequence_id, 0)

    def _open(self, sequence: LiveSequence, start: Start) -> None:
        """Let a sequence run in the slot of `start`."""
        request = sequence.request
        slot = sequence.slot = start.slot
        slot.tokens, slot.n_held, slot.n_kept = sequence.tokens, start.n_kept, start.n_kept
        slot.adapters, slot.pictures = request.adapters, request.pictures
        sequence.n_sent, sequence.is_unsure = start.n_kept, start.is_unsure
        sequence.marks = self._marks(sequence)
        if start.is_restored:  # who follows it begins there
            sequence.marks = (*sequence.marks, start.n_kept)
        self.running[sequence.sequence_id] = sequence
        self.note_ready(sequence)
        self._operate(_opening(request, slot.slot, start), is_resumed=sequence.n_generated > 0)
        places = [place for place in request.pictures if place.end > start.n_kept]
        if places:
            sequence.is_encoding = True
            encode = EncodePictures(sequence_id=sequence.sequence_id, places=places)
            self.pending.append(encode)

    def _marks(self, sequence: LiveSequence) -> tuple[int, ...]:
        """Say where rows of a prompt are cut: states are kept there, as other prompts may part.

        That is behind its first message, behind the last ones, and before its last rows. Prompts
        that are shorter than a block are not worth a further step, nor are few rows.
        """
        n_positions = len(sequence.tokens)
        if self.ring.room_states is None or n_positions <= BLOCK_POSITIONS:
            return ()
        stop_ids = sequence.request.stop_ids
        ends = [at for at, token in enumerate(sequence.tokens, start=1) if token in stop_ids]
        marks, tail = [0], n_positions - PROMPT_TAIL_ROWS
        for end in sorted({*ends[:1], *ends[-_LAST_MESSAGES:]}):
            if marks[-1] + _LEAST_APART <= end <= tail - _LEAST_APART:
                marks.append(end)
        return (*marks[1:], tail)

    def keep_state(self, sequence: LiveSequence, position: int) -> None:
        """Have stages keep the state before a sequence's next rows, if others may begin there."""
        slot = sequence.slot
        if slot is None or not position or not self.kv_blocks.keeps_states:
            return
        if position % BLOCK_POSITIONS == 0 or position in sequence.marks:
            self._keep_state(slot, position)

    def _keep_state(self, slot: Slot, n_positions: int) -> None:
        state = self.kv_blocks.keep_state(slot, n_positions)
        if state is not None:
            self._operate(KeepState(slot=slot.slot, n_positions=n_positions, state=state))

    def _operate(
        self, operation: SlotOperation, *, is_resumed: bool = False, is_pause: bool = False
    ) -> None:
        """Tell the stages. Before anything is kept they give back what is kept for nothing."""
        dropped = self.kv_blocks.take_dropped()
        if dropped:
            self.pending.append(OperateSlot(operation=DropStates(states=dropped)))
        self.pending.append(
            OperateSlot(operation=operation, is_resumed=is_resumed, is_pause=is_pause)
        )

    def encoded(self, sequence_id: SequenceId) -> None:
        """Note that the first stage has the rows of all pictures of a sequence, if it runs."""
        if sequence_id in self.running:
            self.running[sequence_id].is_encoding = False

    def _restores(self, sequence: LiveSequence) -> bool:
        """Say whether a sequence should begin with what is on disk: a block more than any slot has.

        It is tried once. Bits of a deterministic sequence depend on how its chunks were computed.
        """
        request = sequence.request
        if not (request.n_stored and sequence.may_restore):
            return False
        sequence.may_restore = False
        if request.deterministic or request.whole_prompt or sequence.n_generated:
            return False
        held = self.kv_blocks.prefix(sequence.tokens, request.adapters, request.pictures)
        return request.n_stored >= (held.n_kept if held else 0) + BLOCK_POSITIONS

    def _start_restoring(self, sequence: LiveSequence, n_blocks: int) -> None:
        start = self.kv_blocks.start_empty(n_blocks)
        self._free(start.given_up)
        sequence.slot = start.slot
        sequence.slot.tokens = sequence.tokens
        sequence.slot.adapters = sequence.request.adapters
        sequence.slot.pictures = sequence.request.pictures
        sequence.is_restoring = True
        self.running[sequence.sequence_id] = sequence
        self.pending.append(
            RestorePrefix(sequence_id=sequence.sequence_id, n_positions=sequence.request.n_stored)
        )

    def restored(self, sequence_id: SequenceId, n_positions: int) -> bool:
        """Open a sequence whose first positions every stage has read; with 0 none has.

        Returns False, and nothing changed, for one that waits for no such thing any more.
        """
        sequence = self.running.get(sequence_id)
        if sequence is None or not sequence.is_restoring or sequence.slot is None:
            return False
        sequence.is_restoring = False
        self.kv_blocks.restored(sequence.slot, n_positions)
        start = Start(slot=sequence.slot, n_kept=n_positions, is_restored=n_positions > 0)
        self._open(sequence, start)
        return True

    def _pause(self, sequence: LiveSequence) -> None:
        """Pause a sequence: free its slot and queue it to be replayed from its tokens."""
        self._leave(sequence, n_kept=0, is_pause=True)
        sequence.n_sent = 0
        self._wait(sequence)

    def drop_warm(self) -> None:
        """Free all warm slots, and their memory on every stage."""
        for slot in self.kv_blocks.warm():
            self.kv_blocks.drop(slot)
            self._free([slot])

    def start_anew(self, sequence: LiveSequence) -> None:
        """Pause a sequence, and let what is in flight of it count for nothing."""
        if sequence.slot is not None:
            self._pause(sequence)
        self.anew.add(sequence.sequence_id)
        sequence.may_restore = False
        sequence.land()

    def unsure(self) -> list[LiveSequence]:
        """List the sequences that were started with rows which were in flight, and may still be."""
        return [each for each in (*self.running.values(), *self.waiting) if each.is_unsure]

    def end(self, sequence: LiveSequence, *, keep_warm: bool) -> None:
        """End a sequence. Steps of it that are in flight reach the stages before its slot is
        closed.
        """
        if self.running.get(sequence.sequence_id) is not sequence:
            self.waiting.remove(sequence)
            self.anew.discard(sequence.sequence_id)
            return
        assert sequence.slot is not None
        self._leave(
            sequence, n_kept=self.kv_blocks.worth_keeping(sequence.slot) if keep_warm else 0
        )

    def secure_row(self, sequence: LiveSequence) -> bool:
        """Book room for one more row, pausing the youngest sequences if needed.

        Returns False if `sequence` itself was paused."""
        while sequence.slot is not None:
            given_up = self.kv_blocks.grow(sequence.slot, sequence.n_sent + 1)
            if given_up is not None:
                self._free(given_up)
                return True
            self._pause(max(self.running.values(), key=lambda running: running.rank))
        return False

    def note_ready(self, sequence: LiveSequence) -> None:
        """Mark a running sequence as ready if only the row of its newest token is left to send."""
        if sequence.is_ready_to_decode:
            self.ready[sequence.sequence_id] = sequence

    def _leave(self, sequence: LiveSequence, *, n_kept: int, is_pause: bool = False) -> None:
        slot = sequence.slot
        assert slot is not None
        del self.running[sequence.sequence_id]
        self.ready.pop(sequence.sequence_id, None)
        sequence.slot = None
        sequence.is_encoding = False
        if sequence.is_restoring:  # no stage knows of it yet
            sequence.is_restoring = False
            self.kv_blocks.drop(slot)
            return
        given_up: tuple[Slot, ...] = ()
        stored = self._stored(sequence, slot) if n_kept else ()
        if n_kept:
            self._keep_state(slot, n_kept)
            given_up = self.kv_blocks.keep_warm(slot, n_kept)
        else:
            self.kv_blocks.drop(slot)
        closing = CloseSequence(
            sequence_id=sequence.sequence_id,
            slot=slot.slot,
            n_kept=n_kept,
            stored=stored,
            stored_states=stored_states(slot) if stored else (),
        )
        self._operate(closing, is_pause=is_pause)
        self._free(given_up)

    def _stored(self, sequence: LiveSequence, slot: Slot) -> tuple[bytes, ...]:
        """Return the keys of the blocks to keep on disk of a sequence that ends.

        Rows that were not answered do not count: a step may still fail on some stage.
        """
        n_positions = min(slot.n_held, slot.n_answered)
        if self.ring.prefix_seed is None or n_positions < STORED_PREFIX_POSITIONS:
            return ()
        request = sequence.request
        return block_keys(
            self.ring.prefix_seed, sequence.tokens, n_positions, request.adapters, request.pictures
        )

    def _free(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._operate(FreeSlot(slot=slot.slot))


def stored_states(slot: Slot) -> tuple[StoredState, ...]:
    """List the kept states of a slot to write to disk: the last ones, and some before them."""
    at_ends = [kept for kept in slot.states if kept.position % BLOCK_POSITIONS == 0]
    return tuple(
        StoredState(n_blocks=kept.position // BLOCK_POSITIONS, state=kept.state)
        for kept in at_ends
        if kept in at_ends[-_LAST_STORED:] or kept.position % STORED_STATE_POSITIONS == 0
    )


def _opening(request: SequenceRequest, slot: SlotId, start: Start) -> OpenSequence:
    """Tell the stages of a sequence. Its stop ids matter only while they are held back."""
    holds_back = request.sampling.min_tokens > 0
    return OpenSequence(
        sequence_id=request.sequence_id,
        slot=slot,
        sampling=request.sampling,
        n_kept=start.n_kept,
        source=start.source,
        state=start.state,
        is_restored=start.is_restored,
        n_prompt=len(request.prompt),
        stop_ids=tuple(sorted(request.stop_ids)) if holds_back else (),
        outputs=request.outputs,
        n_drafts=request.n_drafts,
        adapters=request.adapters,
        pictures=request.pictures,
        draft_layers=request.draft_layers,
        draft_from=max(0, len(request.prompt) - DRAFT_POSITIONS) if request.draft_layers else 0,
    )
