"""The ring as it was seen: its plan, its requests, its last steps with their means and rates.

Pure: takes what the head says; its clock is the only one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import convert

from shardnet.api.dashboard.state import (
    ShownBehind,
    ShownLoading,
    ShownProgress,
    ShownRates,
    ShownRequest,
    ShownRing,
    ShownStage,
    ShownStageTime,
    ShownStep,
    ShownSteps,
)
from shardnet.checkpoint.model_names import short_name
from shardnet.types import LiveState
from shardnet.wire.messages.activity import RequestProgress, RingActivity, RingOpening, StepRecord
from shardnet.wire.messages.plans import PlannedStage, PlanReply

WINDOW_S: Final = 5.0
"""Rates and means are those of so many seconds."""
SHORTEST_S: Final = 0.2
"""Rates of less would be those of chance."""
MAX_STEPS: Final = 16384
"""Steps that are remembered: those of the window of a very fast ring."""
MAX_SHOWN: Final = 256
"""Steps in one answer: more are no strip that anybody can read."""


class RingHistory:
    """Remembers one ring, and that of another name in its place."""

    def __init__(self) -> None:
        self.activity: RingActivity | None = None
        """What was said last, None before and without a ring."""
        self.plan: PlanReply | None = None
        self._opening: RingOpening | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    @property
    def name(self) -> str:
        """The ring's name, "" without one."""
        return self.activity.ring if self.activity is not None else ""

    @property
    def last_step(self) -> int:
        """The number of the newest step, 0 without one."""
        return self._steps[-1].step if self._steps else 0

    def take(self, activity: RingActivity) -> None:
        """Take what the head said. It left out what was said of this ring before."""
        if activity.ring != self.name:
            self._steps.clear()
            self.plan = None
        self.activity = activity if activity.ring else None
        self.plan = activity.plan or self.plan
        self._opening = activity.opening
        last = self.last_step
        self._steps.extend(step for step in activity.steps if step.step > last)

    def forget(self) -> None:
        """Take that there is no ring."""
        self.take(RingActivity(request=0))

    def ring(self) -> ShownRing | None:
        """Return the ring with what its stages did, None without one."""
        activity, plan = self.activity, self.plan
        if activity is None or plan is None:
            return None
        load = activity.load
        wait = None if load is None else load.wait
        return ShownRing(
            id=activity.ring,
            model=short_name(plan.model),
            head=plan.stages[0].node if plan.stages else "",
            context=plan.context,
            dtype=plan.dtype,
            wire_dtype=plan.wire_dtype,
            quant=plan.quant or None,
            kv_dtype=plan.kv_dtype,
            predicted_tok_s=plan.predicted_tok_s,
            why=plan.why,
            age_s=activity.age_us / 1e6,
            state="recovering"
            if activity.is_recovering
            else "broken"
            if activity.is_broken
            else "ready",
            waits_for=None if wait is None else wait.what,
            expected_s=0.0 if wait is None else wait.expected_s,
            load=load,
            stages=self._stages(plan.stages),
            left_out=plan.left_out,
            rings=[
                ShownBehind(
                    names=one.names,
                    why=one.why or None,
                    n_requests=one.n_requests,
                    n_taken_over=one.n_taken_over,
                    predicted_tok_s=one.predicted_tok_s,
                )
                for one in activity.rings
            ],
            drafters=activity.drafters,
        )

    def loading(self) -> ShownLoading | None:
        """Return what is done to have another ring, None where nobody asked for one."""
        opening = self._opening
        if opening is None or not opening.stages:
            return None
        return ShownLoading(
            model=short_name(opening.model),
            phase=opening.stages[0].phase,
            done_bytes=sum(stage.done_bytes for stage in opening.stages),
            total_bytes=sum(stage.total_bytes for stage in opening.stages),
            nodes=convert(opening.stages, list[ShownProgress], from_attributes=True),
            age_s=opening.age_s,
        )

    def requests(self) -> list[ShownRequest]:
        """List the requests in the order in which they came."""
        activity = self.activity
        return [] if activity is None else [_request(self.name, one) for one in activity.requests]

    def rates(self) -> ShownRates:
        """Return what the ring did in the last WINDOW_S seconds."""
        steps = self._window()
        if not steps:
            return ShownRates()
        span_s = self._span_s(steps)
        round_trips = [step.round_trip_us for step in steps if not step.n_prompt_rows]
        return ShownRates(
            tokens_per_s=sum(step.n_tokens for step in steps) / span_s,
            prefill_tokens_per_s=sum(step.n_prompt_rows for step in steps) / span_s,
            steps_per_s=len(steps) / span_s,
            round_trip_ms=_mean(round_trips) / 1e3 if round_trips else None,
        )

    def steps(self, ring: str = "", after: int = 0) -> ShownSteps:
        """Return the last steps; of the ring `ring` only those after step number `after`."""
        if self.activity is None:
            return ShownSteps()
        least = after if ring == self.name else 0
        newest = [step for step in self._steps if step.step > least][-MAX_SHOWN:]
        return ShownSteps(
            ring=self.name,
            now_ms=self.activity.age_us / 1e3,
            steps=[shown_step(step) for step in newest],
        )

    def _window(self) -> list[StepRecord]:
        """List the steps that came round in the last WINDOW_S seconds."""
        if self.activity is None:
            return []
        least_us = self.activity.age_us - WINDOW_S * 1e6
        return [step for step in self._steps if step.sent_us + step.round_trip_us >= least_us]

    def _span_s(self, steps: Sequence[StepRecord]) -> float:
        """Return how many of the last seconds the steps tell of: less after a pause."""
        assert self.activity is not None
        since_s = (self.activity.age_us - steps[0].sent_us) / 1e6
        return min(WINDOW_S, max(SHORTEST_S, since_s))

    def _stages(self, planned: Sequence[PlannedStage]) -> list[ShownStage]:
        steps = self._window()
        decoding = [step for step in steps if not step.n_prompt_rows]
        wire_ms = _mean([_wire_us(step) / _n_hops(step) for step in decoding]) / 1e3
        stages = []
        for stage in planned:
            shown = ShownStage(
                rank=stage.rank,
                node=stage.node,
                name=stage.name,
                layers=stage.layers,
                weight_bytes=stage.weight_bytes,
                kv_bytes=stage.kv_bytes,
                streamed_layers=stage.streamed_layers,
                predicted_compute_ms=stage.compute_ms,
                predicted_hop_ms=stage.hop_ms,
            )
            timings = [one for step in decoding for one in step.timings if one.rank == stage.rank]
            if timings:
                shown.compute_ms = _mean([one.compute_us for one in timings]) / 1e3
                shown.queue_ms = _mean([one.queue_us for one in timings]) / 1e3
                shown.wire_ms = wire_ms
            if steps:
                every = [one for step in steps for one in step.timings if one.rank == stage.rank]
                busy_s = sum(one.compute_us for one in every) / 1e6
                shown.busy = min(1.0, busy_s / self._span_s(steps))
            stages.append(shown)
        return stages


def shown_step(step: StepRecord) -> ShownStep:
    """Return a step with the moments at which its stages computed.

    Each time was measured by the clock of its stage. What is left of the round trip was spent on
    the wire, on each hop the same as far as is known.
    """
    wire_us = _wire_us(step)
    hop_us = wire_us / _n_hops(step)
    stages, at_us = [], 0.0
    for timing in step.timings:
        at_us += timing.queue_us
        stages.append(
            ShownStageTime(
                rank=timing.rank,
                start_ms=at_us / 1e3,
                queue_ms=timing.queue_us / 1e3,
                compute_ms=timing.compute_us / 1e3,
            )
        )
        at_us += timing.compute_us + hop_us
    return ShownStep(
        step=step.step,
        sent_ms=step.sent_us / 1e3,
        round_trip_ms=step.round_trip_us / 1e3,
        rows=step.n_rows,
        prompt_rows=step.n_prompt_rows,
        tokens=step.n_tokens,
        wire_ms=wire_us / 1e3,
        stages=stages,
    )


def request_id(ring: str, sequence: int) -> str:
    """Return the id of a request: numbers of another ring mean others."""
    return f"{ring}-{sequence}"


def parse_request_id(text: str) -> tuple[str, int] | None:
    """Return the ring and the number that `request_id` was made of, None if it was not."""
    ring, _, number = text.rpartition("-")
    is_one = ring and len(ring) <= 256 and number.isascii() and number.isdigit()
    return (ring, int(number)) if is_one and len(number) < 19 else None


def _request(ring: str, seen: RequestProgress) -> ShownRequest:
    is_prefilled = seen.n_computed >= seen.n_prompt
    waits = seen.state in (LiveState.QUEUED, LiveState.PAUSED, LiveState.RECOVERING)
    return ShownRequest(
        id=request_id(ring, seen.sequence),
        state=seen.state.value,
        phase="queued" if waits else "decode" if is_prefilled else "prefill",
        n_prompt=seen.n_prompt,
        n_prefilled=seen.n_computed,
        n_cached=seen.n_kept,
        n_generated=seen.n_tokens,
        max_tokens=seen.max_tokens,
        age_s=seen.age_s,
        priority=seen.priority,
        ahead=seen.ahead,
        waits_for=seen.waits_for or None,
        expected_s=seen.expected_s,
    )


def _wire_us(step: StepRecord) -> int:
    """Return what of a round trip was neither computing nor queueing; a ring of one has no wire."""
    if len(step.timings) < 2:
        return 0
    in_stages = sum(one.compute_us + one.queue_us for one in step.timings)
    return max(0, step.round_trip_us - in_stages)


def _n_hops(step: StepRecord) -> int:
    return max(1, len(step.timings))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
