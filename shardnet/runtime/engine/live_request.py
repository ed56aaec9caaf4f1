"""Running requests of an engine: their text, their timing, and the events that clients wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, assert_never

from shardnet.errors import ShardnetError, internal_error, where
from shardnet.output_params import OutputKind
from shardnet.runtime.engine.counters import EngineTotals
from shardnet.runtime.engine.guide import Guide
from shardnet.runtime.engine.model_drafts import TakesStates
from shardnet.runtime.engine.outputs import OutputCollector, OutputEvent
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    RequestMoved,
    StepTrace,
    TokenGenerated,
)
from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.runtime.scheduling.acceptance import DraftCounts
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, RingDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    FinishReason,
    OperateSlot,
    Outcome,
    SequenceFailed,
    SequenceFinished,
    TokenSampled,
)
from shardnet.sampling_params import TokenLogprobs
from shardnet.slot_operations import CloseSequence, OpenSequence
from shardnet.types import U32_MAX, LiveState, RowGroup, SequenceId
from shardnet.wire.messages.activity import RequestProgress
from shardnet.wire.messages.generation import MeanStageTime, Timing
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.payloads.rows import RowBlock

FEWEST_ALONE: Final = 16
"""From so many steps on the time of a stage counts as its usual one."""
MOST_ALONE: Final = 256
ALONE_POSITIONS: Final = 1024
"""Steps at later positions attend to more than those that predictions are made for."""


@dataclass(slots=True, kw_only=True)
class _StageSums:
    n_steps: int = 0
    round_trip_us: int = 0
    compute_us: dict[int, int] = field(default_factory=dict)
    queue_us: dict[int, int] = field(default_factory=dict)

    def add(self, answered: StepAnswered) -> None:
        self.n_steps += 1
        self.round_trip_us += answered.round_trip_us
        for timing in answered.answer.timings:
            rank = timing.rank
            self.compute_us[rank] = self.compute_us.get(rank, 0) + timing.compute_us
            self.queue_us[rank] = self.queue_us.get(rank, 0) + timing.queue_us

    def means(self) -> tuple[MeanStageTime, ...]:
        """Average over steps; time neither computing nor queued is split over the hops, if any."""
        if not self.n_steps:
            return ()
        n_hops = len(self.compute_us) if len(self.compute_us) > 1 else 0
        in_stages = sum(self.compute_us.values()) + sum(self.queue_us.values())
        wire_us = max(0, self.round_trip_us - in_stages) / n_hops if n_hops else 0.0
        return tuple(
            MeanStageTime(
                rank=rank,
                compute_ms=self.compute_us[rank] / self.n_steps / 1000,
                queue_ms=self.queue_us[rank] / self.n_steps / 1000,
                wire_ms=wire_us / self.n_steps / 1000,
            )
            for rank in sorted(self.compute_us)
        )


@dataclass(slots=True, kw_only=True)
class _AloneSteps:
    """What stages computed in the first MOST_ALONE decode steps, as long as all had one row."""

    compute_us: dict[int, list[int]] = field(default_factory=dict)
    is_alone: bool = True

    def add(self, position: int, answered: StepAnswered) -> None:
        self.is_alone &= len(answered.batch.token_ids) == 1
        for timing in answered.answer.timings if position < ALONE_POSITIONS else ():
            steps = self.compute_us.setdefault(timing.rank, [])
            if len(steps) < MOST_ALONE:
                steps.append(timing.compute_us)

    def medians_s(self) -> tuple[float, ...]:
        """Return the usual seconds of each stage, by rank; () for too few steps."""
        n_steps = min((len(steps) for steps in self.compute_us.values()), default=0)
        if not self.is_alone or n_steps < FEWEST_ALONE:
            return ()
        return tuple(median(self.compute_us[rank]) / 1e6 for rank in sorted(self.compute_us))


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One request. Times are the head's clock's, in nanoseconds."""

    request: GenerationRequest
    drafter: AdaptiveDrafter | None
    submitted_ns: int
    guide: Guide | None = None
    ring_drafts: RingDrafts | None = None
    events: asyncio.Queue[RequestEvent | ShardnetError] = field(default_factory=asyncio.Queue)
    state: LiveState = LiveState.QUEUED
    n_tokens: int = 0
    n_computed: int = 0
    """Positions that are in the KV cache."""
    n_kept: int = 0
    """Those of the prompt that were there before it began to run."""
    noted_ns: int = 0
    """When its last step was answered, if no other request lived then and no pause followed."""
    replays: bool = False
    """Whether it ran on a ring that was lost, and has made no token since."""
    waits_for: str = ""
    """What it waits for behind a lost ring, "" for nothing."""
    waits_until_ns: int = 0
    """About how long."""
    outputs: OutputCollector | None = None
    trace: StepTrace | None = None
    _sums: _StageSums = field(default_factory=_StageSums)
    _alone: _AloneSteps = field(default_factory=_AloneSteps)
    _before: LiveState = LiveState.QUEUED
    """How it stood before its ring was lost."""
    _reported_ahead: int | None = None
    _first_ns: int = 0
    _last_ns: int = 0

    def __post_init__(self) -> None:
        if self.request.outputs.asks:
            self.outputs = OutputCollector(self.request.outputs, len(self.request.prompt))
        if self.request.is_traced:
            self.trace = StepTrace(submitted_us=self.submitted_ns // 1000)

    def move(self, state: LiveState, *, n_kept: int = 0) -> None:
        """Record and report that the request runs, is paused or resumes."""
        self.state = state
        self.n_computed = n_kept
        self.replays |= 0 < self.n_tokens == len(self.request.made)
        self.waits_for = ""
        if state is LiveState.RUNNING:
            self.n_kept = n_kept
        self.events.put_nowait(RequestMoved(state=state, n_kept=n_kept))

    @property
    def n_unread(self) -> int:
        """Rows to compute before its next token, 0 while none are."""
        is_read = self.state in (LiveState.RUNNING, LiveState.RESUMED)
        return len(self.request.prompt) + self.n_tokens - self.n_computed if is_read else 0

    def wait_for(self, what: str, expected_s: float, now_ns: int) -> None:
        """Record and report what it waits for, and about how long."""
        self.waits_for, self.waits_until_ns = what, now_ns + int(expected_s * 1e9)
        moved = RequestMoved(state=self.state, n_kept=self.n_kept, why=what, expected_s=expected_s)
        self.events.put_nowait(moved)

    def suspend(self, why: str, expected_s: float, now_ns: int) -> None:
        """Record and report that the ring is gone, and is being replaced.

        What was measured of its stages is forgotten.
        """
        if self.state is not LiveState.RECOVERING:
            self._before = self.state
        self.state = LiveState.RECOVERING
        self.n_computed = self.noted_ns = 0
        self._sums, self._alone = _StageSums(), _AloneSteps(is_alone=False)
        if self.trace is not None:
            self.trace.begin_anew()
        self.wait_for(why, expected_s, now_ns)

    def go_on(self) -> None:
        """Record that there is a ring again: it waits for it as it did, or to be replayed."""
        self.waits_for = ""
        if self.state is LiveState.RECOVERING:
            is_new = self._before is LiveState.QUEUED
            self.state = LiveState.QUEUED if is_new else LiveState.PAUSED
            self.replays |= not is_new
            self._reported_ahead = None

    def report_wait(self) -> None:
        """Report a request that has to wait for room to be replayed."""
        if self.state is LiveState.PAUSED:
            self.events.put_nowait(RequestMoved(state=self.state))

    def report_queue_position(self, ahead: int) -> None:
        """Report how many requests are before this one: at first, and whenever that has halved."""
        if self.state is not LiveState.QUEUED:
            return
        if (
            self._reported_ahead is None
            or ahead <= self._reported_ahead // 2 < self._reported_ahead
        ):
            self._reported_ahead = ahead
            self.events.put_nowait(RequestMoved(state=LiveState.QUEUED, ahead=ahead))

    def take_step(self, group: RowGroup, answered: StepAnswered) -> None:
        """Add the timing of a decode step, and collect the outputs of its rows.

        Outputs of sampled rows are released together with their token.
        """
        self.n_computed = group.position + group.n_rows
        if self.trace is not None:
            self.trace.add(group, answered)
        if group.position >= len(self.request.prompt):
            self._sums.add(answered)
            self._alone.add(group.position, answered)
        if self.outputs is None:
            return
        answer = answered.answer
        self._give(
            self.outputs.arrive(
                [s for s in answer.prompt_logprobs if s.sequence_id == group.sequence_id],
                [
                    block
                    for block in answer.blocks
                    if block.sequence_id == group.sequence_id
                    and block.kind is not OutputKind.STATES
                ],
            )
        )
        self._give(self.outputs.release(group.position + group.n_rows - group.n_sampled))

    def take_token(self, token_id: int, logprobs: TokenLogprobs | None, now_ns: int) -> bool:
        """Add a sampled token. Return whether its text completes a stop string."""
        self._last_ns = now_ns
        self.replays, self.waits_for = False, ""
        self._first_ns = self._first_ns or now_ns
        if self.outputs is not None:
            self._give(self.outputs.release(len(self.request.prompt) + self.n_tokens))
        self.n_tokens += 1
        if self.request.thoughts is not None:
            self.request.thoughts.advance(token_id)
        is_stop_id = token_id in self.request.stop_ids
        text, stopped = ("", False) if is_stop_id else self.request.text.push(token_id)
        self.events.put_nowait(TokenGenerated(token_id=token_id, text=text, logprobs=logprobs))
        return stopped

    def finish(self, reason: FinishReason, now_ns: int) -> None:
        """Report the end, with the text that was held back."""
        if self.outputs is not None:
            self._give(self.outputs.finish())
        self.events.put_nowait(
            GenerationFinished(
                reason=reason,
                text=self.request.text.finish(),
                timing=self._timing(now_ns),
                alone_s=self._alone.medians_s(),
                trace=self.trace,
            )
        )

    def fail(self, error: ShardnetError) -> None:
        """Report the error that ends the request."""
        self.events.put_nowait(error)

    def _give(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self.events.put_nowait(event)

    def _timing(self, now_ns: int) -> Timing:
        """Sum up the timing; without any token the request ended when its prompt was computed."""
        last_ns = self._last_ns or now_ns
        first_ns = self._first_ns or last_ns
        decode_s = (last_ns - first_ns) / 1e9
        return Timing(
            load_s=0.0,
            ttft_s=(first_ns - self.submitted_ns) / 1e9,
            decode_tok_s=(self.n_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            total_s=(last_ns - self.submitted_ns) / 1e9,
            per_stage=self._sums.means(),
            drafters=self.counts.told(),
        )

    @property
    def counts(self) -> DraftCounts:
        """What was drafted for it, what its constraint forced included."""
        counts = DraftCounts()
        for drafter in (self.drafter, self.guide.drafts if self.guide else None):
            if drafter is not None:
                counts.update(drafter.counts)
        return counts


_log = logging.getLogger(__name__)


class LiveRequests(dict[SequenceId, LiveRequest]):
    """Live requests in the order in which they came."""

    def __init__(self, *, scheduler: Scheduler, clock_ns: Callable[[], int]) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._clock_ns = clock_ns

    def progress(self) -> list[RequestProgress]:
        """Say how far the requests are, in the order in which they came."""
        ahead = {sequence_id: n for n, sequence_id in enumerate(self._scheduler.waiting)}
        now_ns = self._clock_ns()
        return [
            RequestProgress(
                sequence=sequence_id,
                state=live.state,
                n_prompt=len(live.request.prompt),
                n_computed=min(live.n_computed, len(live.request.prompt)),
                n_kept=live.n_kept,
                n_tokens=live.n_tokens,
                max_tokens=min(live.request.max_tokens, U32_MAX),
                age_s=max(0.0, (now_ns - live.submitted_ns) / 1e9),
                priority=live.request.priority,
                ahead=ahead.get(sequence_id, 0),
                waits_for=explanation(live.waits_for),
                expected_s=max(0.0, (live.waits_until_ns - now_ns) / 1e9) if live.waits_for else 0,
            )
            for sequence_id, live in self.items()
        ]

    def report_move(self, instruction: OperateSlot, totals: EngineTotals) -> None:
        """Report to its request that a sequence starts, resumes or is paused."""
        match instruction.operation:
            case OpenSequence(sequence_id=sequence_id, n_kept=n_kept, is_restored=is_restored):
                live = self.get(sequence_id)
                if live is None:  # its client has left since it was to be opened
                    return
                was_paused = live.state is LiveState.PAUSED
                if not was_paused:
                    totals.add_prompt(len(live.request.prompt), n_kept, is_restored=is_restored)
                live.move(LiveState.RESUMED if was_paused else LiveState.RUNNING, n_kept=n_kept)
            case CloseSequence(sequence_id=sequence_id) if instruction.is_pause:
                if sequence_id in self:
                    self[sequence_id].move(LiveState.PAUSED)
            case _:
                pass

    def report_queue_positions(self) -> None:
        """Report to waiting requests how many are before them."""
        for ahead, sequence_id in enumerate(self._scheduler.waiting):
            live = self.get(sequence_id)
            if live is not None:
                live.report_queue_position(ahead)

    def take_step(self, groups: Sequence[RowGroup], answered: StepAnswered) -> None:
        """Give the requests of these groups of a step its time and outputs."""
        for group in groups:
            live = self.get(group.sequence_id)
            if live is not None:
                try:
                    live.take_step(group, answered)
                except BaseException as error:
                    self.end_alone(group.sequence_id, live, error)

    def take_states(self, groups: Sequence[RowGroup], blocks: Sequence[RowBlock]) -> None:
        """Give draft sources the hidden states of the rows of these groups, right and wrong ones.

        Those that are wrong come again before their positions count.
        """
        states = [block for block in blocks if block.kind is OutputKind.STATES]
        for group in groups if states else ():
            live = self.get(group.sequence_id)
            if live is not None and live.drafter is not None:
                source = live.drafter.draft_source
                if isinstance(source, TakesStates):
                    source.take_states(
                        [block for block in states if block.sequence_id == group.sequence_id]
                    )

    def note_pace(self, group: RowGroup, n_tokens: int) -> None:
        """Note that a sequence has made so many tokens more, if no other has the ring too.

        The time of prompt rows says nothing of drafts.
        """
        live = self.get(group.sequence_id)
        if live is not None and live.drafter is not None:
            now_ns, before_ns = self._clock_ns(), live.noted_ns
            live.noted_ns = now_ns if len(self) == 1 else 0
            if before_ns and live.noted_ns and group.n_sampled == group.n_rows:
                live.drafter.took(n_tokens, (now_ns - before_ns) / 1e9)

    def may_stop(self, group: RowGroup) -> bool:
        """Say whether the text of a sequence may end it, or say what its next row may be."""
        live = self.get(group.sequence_id)
        return live is not None and (live.request.stops_by_text or live.guide is not None)

    def deliver(self, outcomes: list[Outcome], answered: StepAnswered | None) -> None:
        """Give requests the outcomes of a step, None for one that failed."""
        for outcome in outcomes:
            live = self.get(outcome.sequence_id)
            if live is not None:
                try:
                    self._deliver_to(live, outcome, answered)
                except BaseException as error:
                    self.end_alone(outcome.sequence_id, live, error)

    def _deliver_to(
        self, live: LiveRequest, outcome: Outcome, answered: StepAnswered | None
    ) -> None:
        match outcome:
            case TokenSampled(row=row):
                logprobs = answered.answer.logprobs[row] if answered else None
                stopped = live.take_token(outcome.token_id, logprobs, self._clock_ns())
                if live.guide is not None and live.guide.take(outcome.token_id):
                    stopped = True
                if stopped:
                    self._scheduler.end(outcome.sequence_id)
                    self.finish(outcome.sequence_id, FinishReason.STOP)
            case SequenceFinished(reason=reason):
                if live.guide is not None and live.guide.settle():
                    reason = FinishReason.STOP
                self.finish(outcome.sequence_id, reason)
            case SequenceFailed(error=error):
                self.pop(outcome.sequence_id).fail(error)
            case _:
                assert_never(outcome)

    def end_alone(self, sequence_id: SequenceId, live: LiveRequest, error: BaseException) -> None:
        """End a request by name whose text or outputs have failed: the others share the ring."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if isinstance(error, ShardnetError):  # its text cannot be decoded
            named = error
        else:
            named = internal_error("the text or outputs of a request", error)
            _log.error("%s, raised in %s", named.message, where(error))
            _log.debug("in full:", exc_info=error)
        self.pop(sequence_id, None)
        self._scheduler.end(sequence_id)
        live.fail(named)

    def finish(self, sequence_id: SequenceId, reason: FinishReason) -> None:
        """End a request whose sequence has ended, by name if its text or outputs have no end."""
        live = self.pop(sequence_id)
        try:
            live.finish(reason, self._clock_ns())
        except BaseException as error:
            self.end_alone(sequence_id, live, error)

    def take_made(self, sequence_id: SequenceId, live: LiveRequest) -> None:
        """Report the tokens that a request came with; end it if they were all."""
        request, is_over = live.request, False
        live.report_queue_position(len(self._scheduler.waiting) - 1)
        try:
            for token in request.made:
                is_over = live.take_token(token.token_id, token.logprobs, self._clock_ns())
                if live.guide is not None:
                    is_over |= live.guide.take(token.token_id)
        except BaseException as error:
            self.end_alone(sequence_id, live, error)
            return
        reason = self._scheduler.reason_to_end(sequence_id)
        if is_over or reason is not None:
            self._scheduler.end(sequence_id)
            self.finish(sequence_id, FinishReason.STOP if is_over or reason is None else reason)
