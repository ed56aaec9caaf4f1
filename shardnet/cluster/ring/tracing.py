"""The trace of one request: its steps, with every stage's moments on the head's clock.

Knows how the clocks of stages are compared, before and after. Must not send anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardnet.cluster.peers.clocks import ClockOffset, ahead_at
from shardnet.runtime.engine.requests import StepTrace
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.traces import MAX_PIECE_STEPS, TracedStep, TracePiece


def trace_pieces(
    message: Generate,
    trace: StepTrace,
    nodes: Sequence[str],
    before: Sequence[ClockOffset],
    after: Sequence[ClockOffset],
) -> Iterator[TracePiece]:
    """Cut the trace of a request into messages, one at least.

    `nodes` are the names of the ring's nodes, `before` and `after` how far their clocks were ahead
    of the head's when the request began and ended.
    """
    within_us = [int(max(a.within_us, b.within_us)) for a, b in zip(before, after, strict=True)]
    steps = [_aligned(step, before, after) for step in trace.steps]
    for start in range(0, max(1, len(steps)), MAX_PIECE_STEPS):
        yield TracePiece(
            request=message.request,
            nodes=list(nodes),
            clocks_within_us=within_us,
            submitted_us=trace.submitted_us,
            steps=steps[start : start + MAX_PIECE_STEPS],
            n_left_out=trace.n_left_out,
        )


def _aligned(
    step: TracedStep, before: Sequence[ClockOffset], after: Sequence[ClockOffset]
) -> TracedStep:
    """Move the moments of the stages to the head's clock."""

    def moved(timing: StageTiming) -> StageTiming:
        if timing.rank >= len(before):
            return timing
        ahead_us = ahead_at(step.sent_us, before[timing.rank], after[timing.rank])
        return replace(timing, arrived_us=max(0, round(timing.arrived_us - ahead_us)))

    return replace(step, timings=[moved(timing) for timing in step.timings])
