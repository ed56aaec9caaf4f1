"""The engine: requests in, text out. The head's shell around the scheduler and the pipeline.

Knows which requests live, and brings what the scheduler says to the pipeline and what comes back to
the requests. Must not decide what is sent (scheduler.py) nor how it travels (pipeline.py), and
knows nothing of nodes or plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from functools import partial
from operator import attrgetter
from typing import Final, assert_never

from shardnet.errors import (
    CancelledRequestError,
    DeadlineError,
    PeerFailedError,
    ShardnetError,
)
from shardnet.runtime.engine.counters import EngineTotals, StepLog
from shardnet.runtime.engine.encoding import Encoding, FirstStage
from shardnet.runtime.engine.guide import Guide
from shardnet.runtime.engine.live_request import LiveRequest, LiveRequests
from shardnet.runtime.engine.prefixes import Prefixes, Restoring
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    drafter_of,
)
from shardnet.runtime.engine.waits import Waits
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswered
from shardnet.runtime.scheduling.drafting import RingDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    ComputedSequence,
    EncodePictures,
    FinishReason,
    OperateSlot,
    RestorePrefix,
    SendStep,
    SequenceRequest,
    TokenSampled,
)
from shardnet.runtime.scheduling.step_cost import RingLimits, StepCost, TripCost
from shardnet.runtime.stage.compute import StepFailed
from shardnet.slot_operations import OpenSequence
from shardnet.types import ANY_ROWS, LiveState, SequenceId, StateId
from shardnet.wire.messages.activity import RequestProgress
from shardnet.wire.messages.diagnostics import RingLoad

SLOWDOWN = 2.1
"""A running sequence's tokens may take so many times as long while a prompt travels beside it: 2.2,
less what measurements stray."""

FIRST_MIXED_ROWS = 4
"""Prompt rows beside decode rows before it is known what rows cost on this ring."""

MakePipeline = Callable[[Callable[[StepAnswered], None], Callable[[StepFailed], None]], Pipeline]
"""Makes a pipeline that calls the first function with answers, the second with failed steps."""

_COMPUTE_US: Final = attrgetter("compute_us")


class Engine:
    """Runs requests on a ring, and on the one that replaces it. All calls are made on the loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        make_pipeline: MakePipeline,
        clock_ns: Callable[[], int],
        prefixes: Prefixes | None = None,
        stage: FirstStage | None = None,
    ) -> None:
        """`stage` is the head's own, None where nothing encodes pictures."""
        self._restoring = Restoring(prefixes=prefixes, scheduler=scheduler, on_end=self._pump)
        self._encoding = Encoding(
            scheduler=scheduler,
            stage=stage,
            step_s=self._decode_step_s,
            on_end=self._pump,
            on_failed=self._fail_one,
        )
        self._scheduler = scheduler
        self._begin_trips()
        self.pipeline = make_pipeline(self._on_answered, self._on_failed)
        self._clock_ns = clock_ns
        self._live = LiveRequests(scheduler=scheduler, clock_ns=clock_ns)
        self.waits = Waits(live=self._live, clock_ns=clock_ns)
        """What requests wait for behind a lost ring."""
        self.waits.pace.predicted_s = scheduler.ring.row_s
        self._next_sequence = 1
        self._step_cost = StepCost()
        self.log = StepLog(clock_ns())
        """The last steps that came round."""
        self.totals = EngineTotals()
        self._broken: ShardnetError | None = None
        self._is_held = False
        self._settled = asyncio.Event()
        self._is_suspended = False
        self._replayed: set[SequenceId] = set()
        """Sequences that ran when the ring was lost, and have made no token since."""
        self._on_replayed: Callable[[], None] = lambda: None

    @property
    def n_active(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.n_active

    @property
    def counters(self) -> RingLoad:
        """The requests, slots and KV blocks in use now."""
        n_paused = sum(live.state is LiveState.PAUSED for live in self._live.values())
        n_waiting = len(self._scheduler.waiting)
        kv = self._scheduler.queue.kv_blocks
        return RingLoad(
            running=self._scheduler.n_active - n_waiting,
            waiting=n_waiting - n_paused,
            paused=n_paused,
            warm_slots=len(kv.warm()),
            warm_blocks=kv.warm_blocks,
            used_blocks=kv.booked_blocks,
            room_blocks=kv.room_blocks,
            room_slots=self._scheduler.queue.max_slots,
            restored_positions=self._restoring.n_positions,
            wait=self.waits.now,
        )

    @property
    def age_us(self) -> int:
        """Microseconds since it was made, by the clock of its log."""
        return self.log.age_us(self._clock_ns())

    @property
    def requests(self) -> list[RequestProgress]:
        """How far the requests are that live, in the order in which they came."""
        return self._live.progress()

    @property
    def n_encoded(self) -> int:
        """Pictures that were encoded so far."""
        return self._encoding.n_encoded

    def cancel(self, sequence_id: SequenceId) -> bool:
        """End a request with CancelledRequestError; return whether it lived."""
        error = CancelledRequestError("the request was cancelled by somebody who watches the ring")
        return self._give_up(sequence_id, error)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestEvent, None]:
        """Run one request and yield its events, the last a GenerationFinished.

        Closing the iterator early cancels the request and frees its slot on every stage. Raises
        SamplingError, UsageError, CapacityError or BusyError before a slot is taken, DeadlineError
        when its deadline passes, and whatever ended the ring or the request.
        """
        request.check()
        n_stored = 0 if self._is_suspended else await self._restoring.find(request)
        if self._broken is not None:
            raise self._broken
        speculation = request.speculation
        is_by_ring = speculation is not None and speculation.make_draft_source is None
        ring_drafts = RingDrafts() if is_by_ring else None
        drafter = drafter_of(
            request,
            ring_drafts,
            cost=self._step_cost,
            exact_rows=self._scheduler.limits.exact_rows,
            on_ready=self._pump,
            clock=lambda: self._clock_ns() / 1e9,
        )
        sequence_id = SequenceId(self._next_sequence)
        self._next_sequence += 1
        guide = self._guide(request, sequence_id)
        try:
            self._scheduler.submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt=request.prompt,
                    max_tokens=request.max_tokens,
                    stop_ids=request.stop_ids,
                    priority=request.priority,
                    deterministic=request.deterministic
                    and self._scheduler.limits.exact_rows < ANY_ROWS,
                    whole_prompt=request.outputs.needs_whole_prompt or request.lockstep,
                    lockstep=request.lockstep,
                    sampling=request.sampling,
                    outputs=request.outputs,
                    drafter=drafter,
                    n_drafts=speculation.most_by_ring if speculation is not None else 0,
                    draft_layers=tuple(sorted({*speculation.layers}))
                    if speculation is not None
                    else (),
                    guide=guide,
                    n_stored=n_stored,
                    made=tuple(token.token_id for token in request.made),
                    adapters=request.adapters,
                    pictures=request.places,
                )
            )
        except BaseException:
            if drafter is not None:
                drafter.close()
            raise
        live = LiveRequest(
            request=request,
            drafter=drafter,
            submitted_ns=self._clock_ns(),
            guide=guide,
            ring_drafts=ring_drafts,
        )
        self._live[sequence_id] = live
        digests = [place.digest for place in request.places]
        self._encoding.store.use(digests)
        expiry = self._set_deadline(sequence_id, request)
        reading = self._read_ahead(request, n_stored)
        try:
            if request.made:
                self._live.take_made(sequence_id, live)
            self._pump()
            self._live.report_queue_positions()
            while True:
                event = await live.events.get()
                if isinstance(event, ShardnetError):
                    raise event
                yield event
                if isinstance(event, GenerationFinished):
                    return
        finally:
            if expiry is not None:
                expiry.cancel()
            if reading is not None:
                reading.cancel()
            self._live.pop(sequence_id, None)
            self.totals.drafts.update(live.counts)
            self._encoding.store.leave(digests)
            if self._replayed:
                self._note_replayed(sequence_id)
            if self._scheduler.end(sequence_id):
                self._pump()
                self._live.report_queue_positions()
            if drafter is not None:
                drafter.close()

    def drop_warm(self) -> None:
        """Free what is kept in KV caches for requests to come."""
        if self._broken is None and not self._is_suspended:
            self._scheduler.queue.drop_warm()
            self._pump()

    async def hold(self) -> None:
        """Send nothing more, and wait until all that was sent is answered.

        Then every stage stands still until `release`, or until another ring resumes. Raises what
        ended the ring meanwhile.
        """
        self._is_held = True
        while self._scheduler.n_in_flight:
            self._settled.clear()
            await self._settled.wait()
        if self._broken is not None:
            raise self._broken
        if self._is_suspended:
            raise PeerFailedError("the ring was lost while its steps were awaited")

    def release(self) -> None:
        """Go on after `hold`, on the same ring."""
        self._is_held = False
        for live in self._live.values():
            live.noted_ns = 0
        self._pump()

    def computed(self) -> list[ComputedSequence]:
        """List what running sequences have on every stage; see Scheduler.computed."""
        return self._scheduler.computed()

    def to_follow(self, besides: Collection[StateId] = ()) -> list[ComputedSequence]:
        """List what others can bring of sequences that go on; see AdmissionQueue.to_follow."""
        return self._scheduler.queue.to_follow(besides)

    def moved(self, n_positions: Mapping[SequenceId, int]) -> None:
        """Note what sequences have on all stages of the ring to resume with. While suspended."""
        self._scheduler.queue.moved(n_positions)

    def suspend(self, why: str, expected_s: float = 0.0) -> float:
        """Hold every request, and those that come: the ring is gone, and is being replaced.

        They are told `why`, and how many seconds that may take. Returns how long the oldest step
        has waited for its answer, in seconds. May be called again while it is suspended.
        """
        if self._broken is not None:
            return 0.0
        if not self._is_suspended:
            ran = (LiveState.RUNNING, LiveState.RESUMED)
            self._replayed |= {key for key, live in self._live.items() if live.state in ran}
        self._is_suspended, self._is_held = True, False
        waited_s = self.pipeline.abandon()
        self._restoring.cancel()
        self._encoding.cancel()
        self._scheduler.suspend()
        self._settled.set()
        for live in self._live.values():
            live.suspend(why, expected_s, self._clock_ns())
        return waited_s

    def new_pipeline(self, make_pipeline: MakePipeline) -> Pipeline:
        """Make a pipeline to `resume` with. It is not used before."""
        return make_pipeline(self._on_answered, self._on_failed)

    def resume(
        self,
        pipeline: Pipeline,
        ring: RingLimits,
        *,
        prefixes: Prefixes | None = None,
        stage: FirstStage | None = None,
        on_replayed: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on, on another ring: requests are replayed from their tokens and continue.

        One that could never fit the new ring ends by name. `on_replayed` is called when all that
        ran before have made a token again, or have ended.
        """
        if self._broken is not None:
            return
        self.pipeline, self._restoring.prefixes = pipeline, prefixes
        self.waits.go_on(self._scheduler.ring.n_stages / ring.n_stages, ring.row_s)
        self._encoding.stage = stage
        self._on_replayed = on_replayed
        self.totals.begin_ring()
        for failed in self._scheduler.resume(ring):
            self._live.pop(failed.sequence_id).fail(failed.error)
        self._begin_trips()
        self._replayed &= self._live.keys()
        self._is_suspended = False
        is_bound = ring.limits.exact_rows < ANY_ROWS
        for sequence_id, live in self._live.items():
            live.go_on()
            if live.request.deterministic:
                self._scheduler.batch_exactly(sequence_id, is_bound)
        self._pump()
        self._scheduler.queue.moved({})  # what is not admitted at once is replayed from its tokens
        self._live.report_queue_positions()
        for live in self._live.values():
            live.report_wait()
        self._note_replayed(None)

    def _note_replayed(self, sequence_id: SequenceId | None) -> None:
        """Note that a sequence has made a token or has ended."""
        if self._is_suspended:
            return
        self._replayed -= {sequence_id}
        if not self._replayed:
            on_replayed, self._on_replayed = self._on_replayed, lambda: None
            on_replayed()

    def fail(self, error: ShardnetError) -> None:
        """End every request with `error`, and refuse new ones: the ring is gone."""
        self._broken = error
        self._settled.set()
        self._replayed.clear()
        self._restoring.cancel()
        self._encoding.cancel()
        for sequence_id, live in self._live.items():
            self._scheduler.end(sequence_id)
            live.fail(error)

    def _guide(self, request: GenerationRequest, sequence_id: SequenceId) -> Guide | None:
        if request.constrained is None and request.thoughts is None:
            return None
        return Guide(
            request.constrained,
            request.thoughts,
            cost=self._step_cost,
            clock_ns=self._clock_ns,
            soon=asyncio.get_running_loop().call_soon,
            ready=self._pump,
            ended=partial(self._on_guide_ended, sequence_id),
        )

    def _read_ahead(self, request: GenerationRequest, n_stored: int) -> asyncio.Task[None] | None:
        """Have stages read what a prompt looks up in files, but for what they hold of it."""
        if self.pipeline.read_ahead is None:
            return None
        held = self._scheduler.queue.kv_blocks.prefix(
            request.prompt, request.adapters, request.places
        )
        n_held = max(n_stored, held.n_kept if held else 0)
        return asyncio.create_task(self.pipeline.read_ahead(request.prompt, n_held))

    def _on_guide_ended(self, sequence_id: SequenceId, error: ShardnetError | None) -> None:
        """End a request whose output is complete, or cannot be constrained further."""
        live = self._live.get(sequence_id)
        if live is None:
            return
        if error is not None:
            self._live.end_alone(sequence_id, live, error)
        else:
            self._scheduler.end(sequence_id)
            self._live.finish(sequence_id, FinishReason.STOP)
        self._pump()

    def _pump(self) -> None:
        """Carry out what the scheduler wants sent now."""
        if self._broken is not None or self._is_suspended or self._is_held:
            self._settled.set()
            return
        is_opened = False
        for instruction in self._scheduler.next_instructions():
            match instruction:
                case SendStep(batch=batch):
                    self.pipeline.send(batch)
                case OperateSlot(operation=operation):
                    self._live.report_move(instruction, self.totals)
                    self.pipeline.operate(operation)
                    is_opened |= isinstance(operation, OpenSequence)
                case RestorePrefix():
                    self._restoring.begin(instruction, self._live)
                case EncodePictures():
                    self._encoding.begin(instruction, self._live)
                case _:
                    assert_never(instruction)
        if is_opened:
            self._live.report_queue_positions()
            self.waits.tell_replays()

    def _begin_trips(self) -> None:
        """Learn anew what prompts cost those who decode: nothing is known of this ring."""
        self._trips = TripCost()
        self._scheduler.mixed_rows = min(self._scheduler.limits.mixed_rows, FIRST_MIXED_ROWS)

    def _decode_step_s(self) -> float | None:
        """Return what a decode step takes, None if no sequence decodes."""
        return self._step_cost.step_s if self._scheduler.n_decoding else None

    def _fail_one(self, sequence_id: SequenceId, error: ShardnetError) -> None:
        """End a request whose pictures cannot be encoded."""
        live = self._live.get(sequence_id)
        if live is not None:
            self._live.end_alone(sequence_id, live, error)
        self._pump()

    def _set_deadline(
        self, sequence_id: SequenceId, request: GenerationRequest
    ) -> asyncio.TimerHandle | None:
        if request.deadline_s is None:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(request.deadline_s, self._expire, sequence_id)

    def _expire(self, sequence_id: SequenceId) -> None:
        """End a request whose deadline has passed, wherever it is."""
        live = self._live.get(sequence_id)
        if live is not None:
            error = DeadlineError(
                f"the request did not end within its deadline of {live.request.deadline_s:g} s, "
                f"after {live.n_tokens} tokens: allow more time, or ask for fewer tokens"
            )
            self._give_up(sequence_id, error)

    def _give_up(self, sequence_id: SequenceId, error: ShardnetError) -> bool:
        """End a request, wherever it is, with an error; return whether it lived."""
        live = self._live.pop(sequence_id, None)
        if live is None:
            return False
        self._scheduler.end(sequence_id)
        live.fail(error)
        self._pump()
        self._live.report_queue_positions()
        return True

    def _on_answered(self, answered: StepAnswered) -> None:
        step, flies = answered.answer.step, answered.answer.step in self._scheduler.beside
        groups, is_behind = self._scheduler.counting(step), step in self._scheduler.behind
        for drafts in answered.answer.drafts:
            drafted = self._live.get(SequenceId(drafts.sequence_id))
            if drafted is not None and drafted.ring_drafts is not None:
                drafted.ring_drafts.take(drafts.position, drafts.token_ids)
        self._live.take_states(groups, answered.answer.blocks)
        outcomes = self._scheduler.on_tokens(answered.answer.step, answered.answer.token_ids)
        waits = any(map(self._live.may_stop, groups))
        if waits:
            self._live.take_step(groups, answered)
            self._live.deliver(outcomes, answered)
        self._pump()
        # The next step is on its way: what it need not wait for comes last.
        n_rows, n_sampled = answered.batch.n_rows, answered.batch.n_sampled
        if not waits:
            n_live = len(self._live)
            self._live.take_step(groups, answered)
            self._live.deliver(outcomes, answered)
            if len(self._live) < n_live:
                self._pump()
        self._learn_cost(answered, n_rows, n_sampled, flies=flies)
        n_tokens = 0
        for outcome in outcomes:
            n_tokens += isinstance(outcome, TokenSampled)
            if self._replayed:
                self._note_replayed(outcome.sequence_id)
        self.totals.n_tokens += n_tokens
        self.totals.n_flown += is_behind
        if groups:
            self._live.note_pace(groups[0], n_tokens)
        else:
            self.totals.n_wasted += is_behind
        self.log.add(answered, n_rows, n_sampled, n_tokens)

    def _on_failed(self, failed: StepFailed) -> None:
        self._live.deliver(self._scheduler.on_step_failed(failed.step, failed.error), None)
        self._pump()

    def _learn_cost(
        self, answered: StepAnswered, n_rows: int, n_sampled: int, *, flies: bool
    ) -> None:
        """Count a step; take from it what rows cost, and how many may mix."""
        queued_us = self.totals.add_step(answered)
        first = answered.batch.groups[0]
        slowest_us = max(map(_COMPUTE_US, answered.answer.timings), default=0)
        trip_s = answered.round_trip_us / 1e6
        took_s = max(1, answered.round_trip_us - queued_us) / 1e6
        has_decode = first.n_sampled == first.n_rows  # decode rows stand before prompt rows
        if n_sampled < n_rows or self.waits.told_ns:
            self.waits.answered(answered, n_rows - n_sampled, is_mixed=has_decode)
        if not has_decode:
            if answered.answer.timings:
                self._restoring.learn(n_rows, slowest_us)
            self._scheduler.mix(0, n_rows, took_s, self._trips, SLOWDOWN)
            return
        drafted = bool(answered.answer.drafts)
        self._step_cost.learn(n_rows, took_s, slowest_us / 1e6, flies=flies, drafted=drafted)
        if n_sampled == n_rows:
            self._trips.alone.learn(n_rows, took_s, slowest_us / 1e6)
        else:
            self._scheduler.mix(n_sampled, n_rows - n_sampled, trip_s, self._trips, SLOWDOWN)
