"""The engine: requests in, text out. The head's shell around the scheduler and the pipeline.

Knows requests, their text and their timings. Must not decide what is sent (scheduler.py) nor how it
travels (pipeline.py), and knows nothing of nodes or plans.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from shardnet.errors import DeadlineError, SamplingError, ShardnetError, UsageError
from shardnet.runtime.compute import (
    NO_OUTPUTS,
    SequenceClosed,
    SequenceOpened,
    SlotFreed,
    StepFailed,
)
from shardnet.runtime.drafting import MAX_DRAFT_TOKENS, AdaptiveDrafter, Guesser
from shardnet.runtime.outputs import OutputCollector, OutputEvent
from shardnet.runtime.pipeline import Pipeline, StepAnswered
from shardnet.runtime.scheduler import Scheduler
from shardnet.runtime.sequences import (
    CloseSlot,
    FinishReason,
    FreeSlot,
    OpenSlot,
    Outcome,
    SendStep,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    TokenSampled,
)
from shardnet.runtime.step_cost import StepCost
from shardnet.types import (
    MAX_STOP_IDS,
    LiveState,
    OutputParams,
    SamplingParams,
    SequenceId,
    TokenLogprobs,
)

SLOWDOWN = 2.2
"""A running sequence's tokens may take so many times as long while a prompt travels beside it."""

FIRST_MIXED_ROWS = 12
"""Prompt rows beside decode rows before it is known what rows cost on this ring."""

LONGEST_DEADLINE_S = 1e8
"""Three years: what is longer is no deadline, and more than timers take."""


class TextAssembler(Protocol):
    """Turns a sequence's tokens into text that may be shown (model/text.py)."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string was met."""

    def finish(self) -> str:
        """Return what was held back; nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Guess tokens ahead and have the ring verify several at once (design decision 5).

    `make_guesser` gives a request its own guesser, which calls what it is given when it has become
    ready; `most` caps the tokens of one guess.
    """

    make_guesser: Callable[[Callable[[], None]], Guesser]
    most: int = MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue. `stop_ids` end it and their text is not shown.

    A larger `priority` goes first. A request that has not ended after `deadline_s` fails.
    `deterministic` is design decision 4's.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    text: TextAssembler
    priority: int = 0
    deadline_s: float | None = None
    speculation: Speculation | None = None
    deterministic: bool = False
    outputs: OutputParams = NO_OUTPUTS

    def check(self) -> None:
        """Raise SamplingError that names what cannot be asked for."""
        self.sampling.check()
        self.outputs.check()
        if self.sampling.min_tokens and len(self.stop_ids) > MAX_STOP_IDS:
            raise SamplingError(
                f"min-tokens can hold back {MAX_STOP_IDS} stop ids, not {len(self.stop_ids)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMean:
    """Mean of one stage's time over decode steps, in milliseconds."""

    rank: int
    compute_ms: float
    queue_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """How long a request took, by the head's clock, and how many guessed tokens were right."""

    ttft_s: float
    decode_tok_s: float
    total_s: float
    per_stage: tuple[StageMean, ...]
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What an engine has in hand. Blocks are those of one stage, warm ones among the used."""

    running: int
    waiting: int
    paused: int
    warm_slots: int
    warm_blocks: int
    used_blocks: int
    room_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """A request waits behind `ahead` others, or runs, or is paused for want of room.

    The first `n_kept` positions of its prompt were there already when it began to run.
    """

    state: LiveState
    ahead: int = 0
    n_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGenerated:
    """One more token, and the text that became certain with it."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The end of a request. `text` is what was held back until now."""

    reason: FinishReason
    text: str
    timing: RequestTiming


GenerationEvent = RequestMoved | TokenGenerated | OutputEvent | GenerationFinished


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

    def means(self) -> tuple[StageMean, ...]:
        """Split what is neither compute nor queueing over the hops; a ring of one has none."""
        if not self.n_steps:
            return ()
        n_hops = len(self.compute_us) if len(self.compute_us) > 1 else 0
        in_stages = sum(self.compute_us.values()) + sum(self.queue_us.values())
        wire_us = max(0, self.round_trip_us - in_stages) / n_hops if n_hops else 0.0
        return tuple(
            StageMean(
                rank=rank,
                compute_ms=self.compute_us[rank] / self.n_steps / 1000,
                queue_ms=self.queue_us[rank] / self.n_steps / 1000,
                wire_ms=wire_us / self.n_steps / 1000,
            )
            for rank in sorted(self.compute_us)
        )


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request whose end its client has not seen."""

    request: GenerationRequest
    drafter: AdaptiveDrafter | None
    submitted_ns: int
    events: asyncio.Queue[GenerationEvent | ShardnetError] = field(default_factory=asyncio.Queue)
    sums: _StageSums = field(default_factory=_StageSums)
    state: LiveState = LiveState.QUEUED
    told_ahead: int | None = None
    n_tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0
    outputs: OutputCollector | None = None

    def __post_init__(self) -> None:
        if self.request.outputs.asks:
            self.outputs = OutputCollector(self.request.outputs, len(self.request.prompt))

    def give(self, events: Sequence[OutputEvent]) -> None:
        """Hand events to whoever reads them."""
        for event in events:
            self.events.put_nowait(event)


class Engine:
    """Runs the requests of one ring. All calls are made on the event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        make_pipeline: Callable[
            [Callable[[StepAnswered], None], Callable[[StepFailed], None]], Pipeline
        ],
        clock_ns: Callable[[], int],
    ) -> None:
        self._scheduler = scheduler
        scheduler.mixed_rows = min(scheduler.mixed_rows, FIRST_MIXED_ROWS)
        self.pipeline = make_pipeline(self._on_answered, self._on_failed)
        self._clock_ns = clock_ns
        self._live: dict[SequenceId, _Live] = {}
        self._next_sequence = 1
        self._step_cost = StepCost()
        self.n_steps = 0
        """Steps that came round."""
        self.compute_us: Counter[int] = Counter()
        """Time that each rank has computed on them, microseconds."""
        self._broken: ShardnetError | None = None

    @property
    def n_active(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.n_active

    @property
    def counters(self) -> EngineCounters:
        """What it has in hand now."""
        n_paused = sum(live.state is LiveState.PAUSED for live in self._live.values())
        n_waiting = len(self._scheduler.waiting)
        book = self._scheduler.book
        return EngineCounters(
            running=self._scheduler.n_active - n_waiting,
            waiting=n_waiting - n_paused,
            paused=n_paused,
            warm_slots=len(book.warm()),
            warm_blocks=book.warm_blocks,
            used_blocks=book.booked_blocks,
            room_blocks=book.room_blocks,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run one request and yield its events, the last a GenerationFinished.

        Closing the iterator early cancels the request and frees its slot on every stage. Raises
        SamplingError, UsageError, CapacityError or BusyError before a slot is taken, DeadlineError
        when its deadline passes, and whatever ended the ring or the request.
        """
        request.check()
        if self._broken is not None:
            raise self._broken
        drafter = self._drafter(request)
        sequence_id = SequenceId(self._next_sequence)
        self._next_sequence += 1
        self._scheduler.submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt=request.prompt,
                max_tokens=request.max_tokens,
                stop_ids=request.stop_ids,
                priority=request.priority,
                deterministic=request.deterministic,
                whole_prompt=request.outputs.needs_whole_prompt,
                drafter=drafter,
            )
        )
        live = _Live(request=request, drafter=drafter, submitted_ns=self._clock_ns())
        self._live[sequence_id] = live
        expiry = self._set_deadline(sequence_id, request)
        try:
            self._pump()
            self._tell_places()
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
            self._live.pop(sequence_id, None)
            if drafter is not None:
                drafter.guesser.close()
            if self._scheduler.end(sequence_id):
                self._pump()
                self._tell_places()

    def fail(self, error: ShardnetError) -> None:
        """End every request with `error`, and refuse new ones: the ring is gone."""
        self._broken = error
        for sequence_id, live in self._live.items():
            self._scheduler.end(sequence_id)
            live.events.put_nowait(error)

    def _drafter(self, request: GenerationRequest) -> AdaptiveDrafter | None:
        """Make the request's drafter. Raises UsageError where guesses could change its bits."""
        if request.speculation is None:
            return None
        if request.deterministic and self._scheduler.limits.exact_rows == 1:
            raise UsageError(
                "--deterministic and --speculate exclude each other here: on this ring a row's "
                "bits depend on the rows beside it; leave one of them out"
            )
        return AdaptiveDrafter(
            guesser=request.speculation.make_guesser(self._pump),
            cost=self._step_cost,
            most=request.speculation.most,
        )

    def _pump(self) -> None:
        """Carry out what the scheduler wants sent now."""
        if self._broken is not None:
            return
        instructions = self._scheduler.next_instructions()
        for instruction in instructions:
            match instruction:
                case SendStep(batch=batch):
                    self.pipeline.send(batch)
                case OpenSlot(sequence_id=sequence_id, n_kept=n_kept):
                    was_paused = self._live[sequence_id].state is LiveState.PAUSED
                    state = LiveState.RESUMED if was_paused else LiveState.RUNNING
                    self._move(sequence_id, state, n_kept=n_kept)
                    self.pipeline.operate(_opened(instruction, self._live[sequence_id].request))
                case CloseSlot(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                    if instruction.is_pause:
                        self._move(sequence_id, LiveState.PAUSED)
                    self.pipeline.operate(
                        SequenceClosed(sequence_id=sequence_id, slot=slot, n_kept=n_kept)
                    )
                case FreeSlot(slot=slot):
                    self.pipeline.operate(SlotFreed(slot=slot))
                case _:
                    assert_never(instruction)
        if any(isinstance(instruction, OpenSlot) for instruction in instructions):
            self._tell_places()

    def _set_deadline(
        self, sequence_id: SequenceId, request: GenerationRequest
    ) -> asyncio.TimerHandle | None:
        if request.deadline_s is None:
            return None
        delay_s = min(request.deadline_s, LONGEST_DEADLINE_S)
        return asyncio.get_running_loop().call_later(delay_s, self._expire, sequence_id)

    def _expire(self, sequence_id: SequenceId) -> None:
        """End a request whose deadline has passed, wherever it is."""
        live = self._live.pop(sequence_id, None)
        if live is None:
            return
        self._scheduler.end(sequence_id)
        live.events.put_nowait(
            DeadlineError(
                f"the request did not end within its deadline of {live.request.deadline_s:g} s, "
                f"after {live.n_tokens} tokens: allow more time, or ask for fewer tokens"
            )
        )
        self._pump()
        self._tell_places()

    def _move(self, sequence_id: SequenceId, state: LiveState, *, n_kept: int = 0) -> None:
        """Tell a request that it runs, goes on or is paused."""
        live = self._live.get(sequence_id)
        if live is not None:
            live.state = state
            live.events.put_nowait(RequestMoved(state=state, n_kept=n_kept))

    def _tell_places(self) -> None:
        """Tell those that wait how many go before them: at first, and when that has halved."""
        for ahead, sequence_id in enumerate(self._scheduler.waiting):
            live = self._live.get(sequence_id)
            if live is None or live.state is not LiveState.QUEUED:
                continue
            if live.told_ahead is None or ahead <= live.told_ahead // 2 < live.told_ahead:
                live.told_ahead = ahead
                live.events.put_nowait(RequestMoved(state=LiveState.QUEUED, ahead=ahead))

    def _on_answered(self, answered: StepAnswered) -> None:
        outcomes = self._scheduler.on_tokens(answered.answer.step, answered.answer.token_ids)
        self._count_time(answered)
        self._collect(answered)
        self._deliver(outcomes, answered)
        self._pump()

    def _on_failed(self, failed: StepFailed) -> None:
        self._deliver(self._scheduler.on_step_failed(failed.step, failed.error), None)
        self._pump()

    def _count_time(self, answered: StepAnswered) -> None:
        """Book a decode step's time with each of its sequences; prefill steps are not counted."""
        self.n_steps += 1
        queued_us = 0
        for timing in answered.answer.timings:
            self.compute_us[timing.rank] += timing.compute_us
            queued_us += timing.queue_us
        first = answered.batch.groups[0]
        if first.n_sampled == first.n_rows:  # decode rows stand before prompt rows
            took_s = max(1, answered.round_trip_us - queued_us) / 1e6
            self._step_cost.learn(answered.batch.n_rows, took_s)
            if answered.batch.n_sampled < answered.batch.n_rows:
                self._scheduler.mix(answered.batch.n_sampled, self._step_cost, SLOWDOWN)
        for group in answered.batch.groups:
            live = self._live.get(group.sequence_id)
            if live is not None and group.position >= len(live.request.prompt):
                live.sums.add(answered)

    def _collect(self, answered: StepAnswered) -> None:
        """Take outputs of a step's rows. Those of sampled rows count when their token does."""
        for group in answered.batch.groups:
            live = self._live.get(group.sequence_id)
            if live is not None and live.outputs is not None:
                answer = answered.answer
                live.give(
                    live.outputs.arrive(
                        [s for s in answer.prompt_logprobs if s.sequence_id == group.sequence_id],
                        [b for b in answer.blocks if b.sequence_id == group.sequence_id],
                    )
                )
                live.give(live.outputs.release(group.position + group.n_rows - group.n_sampled))

    def _deliver(self, outcomes: list[Outcome], answered: StepAnswered | None) -> None:
        for outcome in outcomes:
            live = self._live.get(outcome.sequence_id)
            if live is None:
                continue
            match outcome:
                case TokenSampled(row=row):
                    logprobs = answered.answer.logprobs[row] if answered else None
                    self._on_token(live, outcome, logprobs)
                case SequenceFinished(reason=reason):
                    self._finish(live, outcome.sequence_id, reason)
                case SequenceFailed(error=error):
                    del self._live[outcome.sequence_id]
                    live.events.put_nowait(error)
                case _:
                    assert_never(outcome)

    def _on_token(self, live: _Live, sampled: TokenSampled, logprobs: TokenLogprobs | None) -> None:
        live.last_ns = self._clock_ns()
        live.first_ns = live.first_ns or live.last_ns
        if live.outputs is not None:
            live.give(live.outputs.release(len(live.request.prompt) + live.n_tokens))
        live.n_tokens += 1
        is_stop_id = sampled.token_id in live.request.stop_ids
        text, stopped = ("", False) if is_stop_id else live.request.text.push(sampled.token_id)
        live.events.put_nowait(
            TokenGenerated(token_id=sampled.token_id, text=text, logprobs=logprobs)
        )
        if stopped:
            self._scheduler.end(sampled.sequence_id)
            self._finish(live, sampled.sequence_id, FinishReason.STOP)

    def _finish(self, live: _Live, sequence_id: SequenceId, reason: FinishReason) -> None:
        del self._live[sequence_id]
        if live.outputs is not None:
            live.give(live.outputs.finish())
        live.events.put_nowait(
            GenerationFinished(
                reason=reason, text=live.request.text.finish(), timing=self._timing(live)
            )
        )

    def _timing(self, live: _Live) -> RequestTiming:
        """Sum the request's times up; without any token it ended when its prompt was computed."""
        last_ns = live.last_ns or self._clock_ns()
        first_ns = live.first_ns or last_ns
        decode_s = (last_ns - first_ns) / 1e9
        return RequestTiming(
            ttft_s=(first_ns - live.submitted_ns) / 1e9,
            decode_tok_s=(live.n_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            total_s=(last_ns - live.submitted_ns) / 1e9,
            per_stage=live.sums.means(),
            n_drafted=live.drafter.n_proposed if live.drafter else 0,
            n_accepted=live.drafter.n_accepted if live.drafter else 0,
        )


def _opened(instruction: OpenSlot, request: GenerationRequest) -> SequenceOpened:
    """Tell the stages of a sequence; the tail alone looks at how it is sampled."""
    holds_back = request.sampling.min_tokens > 0
    return SequenceOpened(
        sequence_id=instruction.sequence_id,
        slot=instruction.slot,
        sampling=request.sampling,
        n_kept=instruction.n_kept,
        source=instruction.source,
        n_prompt=len(request.prompt),
        stop_ids=tuple(sorted(request.stop_ids)) if holds_back else (),
        outputs=request.outputs,
    )
