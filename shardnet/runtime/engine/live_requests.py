"""The requests of an engine that have not ended, by their sequences.

Knows how answers and failures reach a request, and that one request's failure is no other's. Must
not know what is sent (scheduler.py) nor when (engine.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from shardnet.errors import ShardnetError, internal_error, where
from shardnet.runtime.engine.counters import EngineTotals
from shardnet.runtime.engine.live_request import LiveRequest
from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    FinishReason,
    OperateSlot,
    Outcome,
    SequenceFailed,
    SequenceFinished,
    TokenSampled,
)
from shardnet.slot_operations import CloseSequence, OpenSequence
from shardnet.types import U32_MAX, LiveState, RowGroup, SequenceId
from shardnet.wire.messages.activity import RequestProgress

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
            )
            for sequence_id, live in self.items()
        ]

    def report_move(self, instruction: OperateSlot, totals: EngineTotals) -> None:
        """Report to its request that a sequence starts, resumes or is paused."""
        match instruction.operation:
            case OpenSequence(sequence_id=sequence_id, n_kept=n_kept):
                live = self[sequence_id]
                was_paused = live.state is LiveState.PAUSED
                if not was_paused:
                    totals.add_prompt(len(live.request.prompt), n_kept)
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

    def note_pace(self, sequence_id: SequenceId, n_tokens: int) -> None:
        """Note that a sequence has made so many tokens more, if no other has the ring too."""
        live = self.get(sequence_id)
        if live is not None and live.drafter is not None:
            now_ns, before_ns = self._clock_ns(), live.noted_ns
            live.noted_ns = now_ns if len(self) == 1 else 0
            if before_ns and live.noted_ns:
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
        """End a request whose sequence has ended."""
        self.pop(sequence_id).finish(reason, self._clock_ns())

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
