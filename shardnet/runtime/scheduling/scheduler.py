"""The scheduler: which rows are sent next. Pure.

Knows positions, rows and the steps in flight; the admission queue decides which sequences run. It
takes events (a request, an answered step, a cancellation) and returns instructions and outcomes. It
must not know time, tensors, text, sockets or asyncio: the engine carries its instructions out.

Rules it keeps (design decisions 1, 2, 4 to 7; docs/scheduling.md):

- while sequences decode, as many steps are in flight as there are stages: each carries its share
  of the sequences plus up to `mixed_rows` prompt rows, limited by how much longer they make the
  trips of decode rows; with prompts alone, twice as many steps;
- where prompt rows may not travel beside those that decode, they go by themselves, every second
  step; more of them than `mixed_rows` are made up for by steps without;
- a prompt by itself goes in chunks of a fixed size, cut at its multiples unless one is near;
- where steps could be in flight and no sequence is ready, drafts go behind drafts that are in
  flight (docs/scheduling.md);
- a row whose token is constrained is sent when its mask is there, and takes it along;
- the KV room of rows is booked before they are sent (scheduling/admission_queue.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from shardnet.errors import CapacityError, LocalProtocolError, ShardnetError, WrongValuesError
from shardnet.runtime.scheduling.admission_queue import AdmissionQueue
from shardnet.runtime.scheduling.kv_block_manager import common_prefix
from shardnet.runtime.scheduling.row_chooser import RowChooser, Rows, row_masks
from shardnet.runtime.scheduling.sequences import (
    ComputedSequence,
    FinishReason,
    Instruction,
    LiveSequence,
    Outcome,
    SendStep,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    TokenSampled,
)
from shardnet.runtime.scheduling.step_cost import MIXED_ROWS, RingLimits, StepLimits, TripCost
from shardnet.types import MicroBatch, RowGroup, SequenceId, StepId

_IS_DECODING: Final = attrgetter("is_decoding")
_IS_DETERMINISTIC: Final = attrgetter("request.deterministic")
_MAY_TRAVEL: Final = attrgetter("may_travel")
_IS_LOCKSTEP: Final = attrgetter("request.lockstep")
_PREFIX_ROWS: Final = 8
"""A sequence waits for a prefix that another is computing only if that saves as many rows."""
_ALONE_EVERY, _ALONE_SOON = 128, 32
"""Of so many steps with decode rows one goes without prompts: so it is known how long it takes. Of
the fewer where more or fewer sequences decode than then."""


@dataclass(slots=True)
class Scheduler:
    """Schedules the sequences of one ring."""

    ring: RingLimits
    mixed_rows: int = field(init=False)
    """Most prompt rows batched with decode rows at present."""
    queue: AdmissionQueue = field(init=False)
    """What waits and runs, and the KV room that is booked for it."""
    _chooser: RowChooser = field(init=False)
    _steps: dict[StepId, tuple[tuple[RowGroup, LiveSequence, int], ...]] = field(
        default_factory=dict
    )
    """The groups of each step in flight, with their sequences and the flights of these."""
    behind: set[StepId] = field(init=False, default_factory=set)
    """The steps in flight that are drafts behind drafts in flight."""
    beside: set[StepId] = field(init=False, default_factory=set)
    """These, and those that were in flight with one of them."""
    _next_step: int = 1
    _is_prompt_due: bool = False
    """Whether the last step had decode rows alone although a prompt is being computed."""
    _n_mixed: int = _ALONE_EVERY
    """Steps with decode rows since one went without prompts, itself included."""
    _n_alone: int = 0
    """Sequences that decoded then."""
    _n_owed: int = 0
    """Prompt rows that were sent beyond `mixed_rows`, and are made up for by steps without."""
    _n_round: int = 0
    """Rows of the lockstep round that are still to be sent, `_round_share` in each step."""
    _round_share: int = 0

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.ring)
        self._chooser = RowChooser(self.queue)
        self.mixed_rows = self.limits.mixed_rows

    @property
    def limits(self) -> StepLimits:
        """What bounds the rows of a step."""
        return self.ring.limits

    @property
    def max_in_flight(self) -> int:
        """Steps that may be in flight: the credit of the ring."""
        return 2 * self.ring.n_stages

    @property
    def n_active(self) -> int:
        """Sequences waiting, running or paused."""
        return len(self.queue.waiting) + len(self.queue.running)

    @property
    def waiting(self) -> list[SequenceId]:
        """Waiting and paused sequences, the next to be admitted first."""
        return [sequence.sequence_id for sequence in self.queue.waiting]

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request. Raises what AdmissionQueue.submit raises."""
        self.queue.submit(request)

    @property
    def n_decoding(self) -> int:
        """Running sequences that are past their prompt."""
        return sum(map(_IS_DECODING, self.queue.running.values()))

    @property
    def n_in_flight(self) -> int:
        """Steps that were sent and are not answered."""
        return len(self._steps)

    def computed(self) -> list[ComputedSequence]:
        """List what running sequences have on every stage; see LiveSequence.computed."""
        found = (sequence.computed for sequence in self.queue.running.values())
        return [computed for computed in found if computed is not None]

    def suspend(self) -> None:
        """Forget the steps in flight and all slots: the ring is gone.

        Its sequences wait. Nothing may be sent before `resume`.
        """
        self._steps.clear()
        self.behind.clear()
        self.beside.clear()
        self._n_round, self._n_mixed = 0, _ALONE_EVERY
        self.queue.suspend()

    def resume(self, ring: RingLimits) -> list[SequenceFailed]:
        """Go on with another ring, on which sequences are replayed from their tokens.

        Returns those that could never fit it, which have ended.
        """
        self.ring = ring
        self.mixed_rows = min(self.mixed_rows, self.limits.mixed_rows)
        return self.queue.move(ring)

    def batch_exactly(self, sequence_id: SequenceId, deterministic: bool) -> None:
        """Change how the rows of a sequence that waits are batched from now on."""
        for sequence in self.queue.waiting:
            if sequence.sequence_id == sequence_id:
                sequence.request = replace(sequence.request, deterministic=deterministic)

    def reason_to_end(self, sequence_id: SequenceId) -> FinishReason | None:
        """Say why a waiting sequence has nothing left to do, None if it has."""
        for sequence in self.queue.waiting:
            if sequence.sequence_id == sequence_id and sequence.n_generated:
                return self._finish_reason(sequence)
        return None

    def next_instructions(self) -> list[Instruction]:
        """Return, in order, everything that may be sent now."""
        self.queue.admit(max(_PREFIX_ROWS, self.mixed_rows))
        most = self.max_in_flight
        while len(self._steps) < most and self._send_step():
            pass
        instructions, self.queue.pending = self.queue.pending, []
        return instructions

    def on_tokens(self, step: StepId, token_ids: Sequence[int]) -> list[Outcome]:
        """Handle the sampled token ids of a step; return what they mean for its sequences.

        Raises LocalProtocolError if the step is not in flight or the number of ids is wrong: the
        pipeline has checked both.
        """
        groups = self._take_step(step)
        if sum(group.n_sampled for group, _, _ in groups) != len(token_ids):
            raise LocalProtocolError(f"step {step} was answered with {len(token_ids)} tokens")
        outcomes: list[Outcome] = []
        row = 0
        for group, sequence, flight in groups:
            sampled = token_ids[row : row + group.n_sampled]
            if self.queue.is_live(sequence) and self._counts(sequence, flight):
                sequence.is_unsure = False  # the steps before were answered
                outcomes += self._answer(sequence, group, sampled, row)
            row += group.n_sampled
        return outcomes

    def on_step_failed(self, step: StepId, error: ShardnetError) -> list[Outcome]:
        """Handle a step that a stage could not compute: its sequences fail, the others continue.

        Where memory was short, one fails, that of the lowest rank, and the others start anew: what
        it held is free then. None has to where one of the step's sequences has failed already, nor
        where one was to begin with states that a stage may lack: it is computed without them.
        Where the values of one are wrong, that one fails. Those who were started with rows that may
        be its own start anew, too.
        """
        groups = self._take_step(step)
        failed = [
            sequence
            for _, sequence, flight in groups
            if self.queue.is_live(sequence) and self._counts(sequence, flight)
        ]
        anew: list[LiveSequence] = []
        slots = [sequence.slot for sequence in failed if sequence.slot is not None]
        if isinstance(error, CapacityError) and any(
            [*map(self.queue.kv_blocks.lose_states, slots)]
        ):
            failed, anew = [], failed
        elif isinstance(error, CapacityError) and len(groups) > 1:
            last = max(failed, key=lambda sequence: sequence.rank, default=None)
            failed, anew = [], failed
            if last is not None and len(anew) == len(groups):
                anew.remove(last)
                failed.append(last)
        elif isinstance(error, WrongValuesError) and error.sequence is not None:
            anew = [sequence for sequence in failed if sequence.sequence_id != error.sequence]
            failed = [sequence for sequence in failed if sequence not in anew]
        for sequence in failed:
            self.queue.end(sequence, keep_warm=False)
        for sequence in anew:
            self.queue.start_anew(sequence)
        for sequence in self.queue.unsure():
            self.queue.start_anew(sequence)
        return [SequenceFailed(sequence_id=one.sequence_id, error=error) for one in failed]

    def counting(self, step: StepId) -> list[RowGroup]:
        """List the groups of a step in flight that say something.

        Those of a sequence do not where a step before them has failed, or had a wrong draft.
        """
        groups = self._steps.get(step, ())
        return [group for group, sequence, flight in groups if self._counts(sequence, flight)]

    def _counts(self, sequence: LiveSequence, flight: int) -> bool:
        return sequence.flight == flight and sequence.sequence_id not in self.queue.anew

    def mix(
        self, n_decode: int, n_prompt: int, trip_s: float, trips: TripCost, slowdown: float
    ) -> None:
        """Choose how many prompt rows to batch with decode rows from now on.

        A step of `n_decode` and `n_prompt` has come back after `trip_s`. A trip shall take at most
        `slowdown` times as long as without prompts; at most twice as many rows are tried next.
        Where prompts go by themselves, those who decode wait for them and then for their own step.
        """
        n_decoding = self.n_decoding
        alone_s = trips.alone_s(max(1, n_decode), min(self.ring.n_stages, max(1, n_decoding)))
        most = min(self.limits.mixed_rows, 2 * n_prompt)
        if alone_s is None or most < min(self.mixed_rows, self.limits.mixed_rows):
            return  # nothing to compare with, or a prompt's last rows
        if not n_decode:
            if not n_decoding or not any(map(_IS_DETERMINISTIC, self.queue.running.values())):
                return  # nobody waits, or those who do go with other rows
            if n_prompt > self.mixed_rows:  # a whole chunk, which steps without make up for
                trip_s += alone_s
            else:
                slowdown -= 1
        trips.learn(n_prompt, trip_s, alone_s)
        choices = [rows for rows in MIXED_ROWS if rows <= most] or [most]
        self.mixed_rows = trips.most_rows(alone_s, slowdown, choices)

    def end(self, sequence_id: SequenceId) -> bool:
        """End a sequence from outside (stop string, cancellation); False if it had ended."""
        if sequence_id in self.queue.running:
            self.queue.end(self.queue.running[sequence_id], keep_warm=True)
            return True
        for sequence in self.queue.waiting:
            if sequence.sequence_id == sequence_id:
                self.queue.end(sequence, keep_warm=False)
                return True
        return False

    # --- sending

    def _send_step(self) -> bool:
        """Send one step if there are rows to send; return whether it was sent."""
        running, n_stages = self.queue.running, self.ring.n_stages
        n_decoding = self.n_decoding
        if any(map(_IS_LOCKSTEP, running.values())):
            return self._send_in_lockstep()
        if not n_decoding:
            self._n_owed = 0
            rows = self._chooser.prompt_rows(self.limits.chunk_rows)
            return self._send(rows, is_decode=False)
        if len(self._steps) - len(self.behind) >= n_stages:
            return False
        chooser = self._chooser
        is_due, self._is_prompt_due = self._is_prompt_due, False
        if is_due and self._send(self._prompts_beside(()), is_decode=False):
            return True
        all_decode = n_decoding == len(running)
        n_frames = max(1, self.max_in_flight // n_decoding) if n_decoding < n_stages else 1
        if all_decode and not self.queue.ready:
            return n_frames > 1 and self._send(chooser.flight_rows(n_frames), is_decode=True)
        n_frames = n_frames if all_decode else 1
        decode = chooser.decode_rows(-(-n_decoding // n_stages), n_frames)
        n_left = n_stages - len(self._steps) + len(self.behind)
        if not decode and n_left == 1 and not all(map(_MAY_TRAVEL, self.queue.ready.values())):
            return False  # kept for a row whose mask or drafts are about to come
        prompts: Sequence[Rows] = ()
        goes_alone = bool(decode) and (all_decode or self._is_alone_due(n_decoding))
        if goes_alone:
            self._n_mixed, self._n_alone = 1, n_decoding
        elif not any(rows.sequence.request.deterministic for rows in decode):
            prompts = self._prompts_beside(decode)
        self._is_prompt_due = bool(decode) and not (goes_alone or prompts)
        return self._send([*decode, *prompts], is_decode=bool(decode))

    def _is_alone_due(self, n_decoding: int) -> bool:
        """Count a step with decode rows; say whether it goes without prompts to be measured."""
        self._n_owed = max(0, self._n_owed - self.mixed_rows)
        self._n_mixed += 1
        return self._n_mixed > (_ALONE_EVERY if n_decoding == self._n_alone else _ALONE_SOON)

    def _prompts_beside(self, decode: Sequence[Rows]) -> Sequence[Rows]:
        """Choose prompt rows to go with `decode`, while sequences decode.

        More than `mixed_rows` are made up for: by a whole chunk of a deterministic prompt, or a
        picture.
        """
        if self._n_owed and (decode or self.queue.ready or self._steps):
            return ()
        prompts = self._chooser.prompt_rows(self.mixed_rows, beside=decode)
        self._n_owed = max(0, sum(rows.n_rows for rows in prompts) - self.mixed_rows)
        return prompts

    def _send_in_lockstep(self) -> bool:
        """Send prompt rows while there are any, then a round: one row of all that run, in order.

        A round is one step for each stage, and begins when the one before it is answered.
        """
        queue = self.queue
        if not self._n_round:
            rows = self._chooser.prompt_rows(self.limits.chunk_rows)
            if rows:
                return self._send(rows, is_decode=False)
            if self._steps or len(queue.ready) < len(queue.running):
                return False
            queue.ready = dict(sorted(queue.ready.items(), key=lambda each: each[1].rank))
            self._n_round = len(queue.ready)
            self._round_share = -(-self._n_round // self.ring.n_stages)
        rows = self._chooser.decode_rows(min(self._round_share, self._n_round))
        self._n_round = self._n_round - len(rows) if rows else 0
        return self._send(rows, is_decode=True)

    def _send(self, rows: Sequence[Rows], *, is_decode: bool) -> bool:
        if not rows:
            return False
        groups = [self._chooser.group(part) for part in rows]
        step = StepId(self._next_step)
        self._next_step += 1
        token_ids = [
            token for part, group in zip(rows, groups, strict=True) for token in part.inputs(group)
        ]
        batch = MicroBatch(
            epoch=self.ring.epoch,
            step=step,
            groups=tuple(groups),
            token_ids=token_ids,
            masks=tuple(row_masks(rows, groups)),
        )
        self._steps[step] = tuple(
            (group, part.sequence, part.sequence.flight)
            for group, part in zip(groups, rows, strict=True)
        )
        if rows[0].is_behind:
            self.behind.add(step)
            self.beside.update(self._steps)
        elif self.behind:
            self.beside.add(step)
        for part, group in zip(rows, groups, strict=True):
            if not part.is_behind:
                self.queue.keep_state(part.sequence, group.position)
            self._count_sent(part, group, is_alone=len(rows) == 1)
        self.queue.pending.append(SendStep(batch=batch, is_decode=is_decode))
        return True

    def _count_sent(self, rows: Rows, group: RowGroup, *, is_alone: bool) -> None:
        sequence, slot = rows.sequence, rows.sequence.slot
        assert slot is not None
        sequence.n_sent += group.n_rows
        sequence.n_in_flight += 1
        sequence.ahead += rows.drafts
        self.queue.ready.pop(sequence.sequence_id, None)
        self.queue.note_ready(sequence)
        if not rows.is_behind:
            slot.n_held = group.position + group.n_rows - len(rows.drafts)
        slot.n_written = max(slot.n_written, group.position + group.n_rows)
        is_whole_chunk = is_alone and group.n_rows == self.limits.chunk_rows
        if is_whole_chunk and slot.n_chunked == group.position and not rows.drafts:
            slot.n_chunked = slot.n_held

    # --- answers

    def _take_step(self, step: StepId) -> tuple[tuple[RowGroup, LiveSequence, int], ...]:
        if step not in self._steps:
            raise LocalProtocolError(f"step {step} is not in flight")
        groups = self._steps.pop(step)
        self.behind.discard(step)
        self.beside.discard(step)
        for _, sequence, _ in groups:
            sequence.n_in_flight -= 1
        return groups

    def _answer(
        self, sequence: LiveSequence, group: RowGroup, sampled: Sequence[int], row: int
    ) -> Iterable[Outcome]:
        """Append the sampled tokens of a live sequence up to the first rejected draft.

        Where all drafts are right, and the first one behind the step too, the flight goes on.
        """
        if not sampled:
            if sequence.slot is not None:
                sequence.slot.note_answered(group.position, group.position + group.n_rows)
            if sequence.request.max_tokens == 0 and group.position + group.n_rows == len(
                sequence.tokens
            ):
                yield self._finish(sequence, FinishReason.LENGTH)
            return
        ahead = sequence.ahead
        n_right = common_prefix(ahead, sampled, min(len(ahead), len(sampled)))
        goes_on = n_right == len(sampled)
        if ahead and sequence.drafted_by is not None:
            sequence.drafted_by.learn(n_right if goes_on else len(ahead), n_right)
        if goes_on:
            del ahead[:n_right]
        elif ahead:
            sequence.land()
        for index, token_id in enumerate(sampled[: n_right + 1]):
            sequence.tokens.append(token_id)
            yield TokenSampled(sequence_id=sequence.sequence_id, token_id=token_id, row=row + index)
            reason = self._finish_reason(sequence)
            if reason is not None:
                n_before = group.position + group.n_rows - group.n_sampled
                self._hold(sequence, group.position, n_before + index + 1)
                yield self._finish(sequence, reason)
                return
        n_before = group.position + group.n_rows - group.n_sampled
        self._hold(sequence, group.position, n_before + min(n_right + 1, group.n_sampled))
        if sequence.slot is not None and not goes_on:
            sequence.n_sent = sequence.slot.n_held
            self.queue.note_ready(sequence)

    def _hold(self, sequence: LiveSequence, position: int, n_positions: int) -> None:
        """Take note that the rows of the first `n_positions` positions are right.

        Those from `position` on have just been answered.
        """
        slot = sequence.slot
        if slot is not None:
            slot.n_held = n_positions
            # As Slot.note_answered, at each token's cost.
            if position <= slot.n_answered or position == slot.n_kept:
                slot.n_answered = n_positions

    def _finish(self, sequence: LiveSequence, reason: FinishReason) -> SequenceFinished:
        self.queue.end(sequence, keep_warm=True)
        return SequenceFinished(sequence_id=sequence.sequence_id, reason=reason)

    def _finish_reason(self, sequence: LiveSequence) -> FinishReason | None:
        if sequence.tokens[-1] in sequence.request.stop_ids:
            return FinishReason.STOP
        is_full = len(sequence.tokens) >= self.ring.context
        if is_full or sequence.n_generated >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None
