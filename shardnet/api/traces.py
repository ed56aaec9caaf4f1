"""Traces of requests: where the time of every step went on every node, and as a file for a viewer.

Knows the trace event format of Chrome, which Perfetto reads too. Must not know links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import convert
from msgspec.structs import asdict

from shardnet import __version__
from shardnet.wire.messages.activity import MAX_TRACED_STEPS, TracedStep, TracePiece

_REQUESTS: Final = 1000
"""The row of all requests: no rank is as high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """What one stage did of a step: it came at `arrived_us`, waited, and was computed."""

    rank: int
    arrived_us: int
    queue_us: int
    compute_us: int

    @property
    def begun_us(self) -> int:
        """When computing began."""
        return self.arrived_us + self.queue_us

    @property
    def done_us(self) -> int:
        """When computing ended."""
        return self.begun_us + self.compute_us


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One step of a request: sent by the head at `sent_us`, answered by the tail.

    `n_rows` of its `n_batch_rows` were the request's, from `position` on; `n_sampled` of them were
    sampled.
    """

    step: int
    position: int
    n_rows: int
    n_sampled: int
    n_batch_rows: int
    sent_us: int
    answered_us: int
    stages: tuple[StageSpan, ...]


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """The steps of one request, all moments in microseconds of the head's clock.

    `nodes` are the names of the ring's nodes in order; their clocks are known to within
    `clocks_within_us`. `n_left_out` steps more were not traced.
    """

    nodes: tuple[str, ...]
    clocks_within_us: tuple[int, ...]
    submitted_us: int
    steps: list[TraceStep]
    n_left_out: int

    @classmethod
    def of(cls, piece: TracePiece) -> RequestTrace:
        """Begin a trace with its first piece."""
        trace = cls(
            nodes=tuple(piece.nodes),
            clocks_within_us=tuple(piece.clocks_within_us),
            submitted_us=piece.submitted_us,
            steps=[],
            n_left_out=piece.n_left_out,
        )
        trace.add(piece)
        return trace

    def add(self, piece: TracePiece) -> None:
        """Take the next piece; no more steps are kept than a head traces."""
        self.steps += map(_step, piece.steps[: MAX_TRACED_STEPS - len(self.steps)])


def chrome_trace(traces: Mapping[str, RequestTrace]) -> dict[str, Any]:
    """Make the content of a trace file of requests to one ring, by what they are called.

    A row per node has what it computed; what waited and what was under way stand above it. The last
    row has the requests.
    """
    begun_us = min((trace.submitted_us for trace in traces.values()), default=0)
    steps = {step.step: step for trace in traces.values() for step in trace.steps}
    nodes = next((trace.nodes for trace in traces.values()), ())
    within = next((trace.clocks_within_us for trace in traces.values()), ())
    events = [*_rows(nodes), *_requests(traces)]
    for step in steps.values():
        events += _step_events(step)
    for event in events:
        if "ts" in event:
            event["ts"] -= begun_us
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "version": f"shardnet {__version__}",
            "clocks_within_us": dict(zip(nodes, within, strict=False)),
            "steps_left_out": sum(trace.n_left_out for trace in traces.values()),
        },
    }


def _rows(nodes: Iterable[str]) -> Iterator[dict[str, Any]]:
    rows = [(rank, f"rank {rank}: {name}") for rank, name in enumerate(nodes)]
    for pid, name in [*rows, (_REQUESTS, "requests")]:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _requests(traces: Mapping[str, RequestTrace]) -> Iterator[dict[str, Any]]:
    """Yield how each request stood: it waited, its prompt was computed, tokens came."""
    for tid, (label, trace) in enumerate(traces.items()):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": _REQUESTS,
            "tid": tid,
            "args": {"name": label},
        }
        if not trace.steps:
            continue
        sampled = [step for step in trace.steps if step.n_sampled]
        first_us = trace.steps[0].sent_us
        last_us = trace.steps[-1].answered_us
        prompt_us = sampled[0].answered_us if sampled else last_us
        for name, begin_us, end_us in (
            ("waits", trace.submitted_us, first_us),
            ("prompt", first_us, prompt_us),
            ("tokens", prompt_us, last_us),
        ):
            yield _span(name, _REQUESTS, tid, begin_us, end_us, {"request": label})


def _step_events(step: TraceStep) -> Iterator[dict[str, Any]]:
    """Yield what one step did in every stage and between them."""
    rows = f"{step.n_batch_rows} row{'s' if step.n_batch_rows != 1 else ''}"
    facts = {
        "step": step.step,
        "rows": step.n_batch_rows,
        "rows of the request": step.n_rows,
        "position": step.position,
    }
    for place, stage in enumerate(step.stages):
        yield _span(f"{rows}", stage.rank, 1, stage.begun_us, stage.done_us, facts)
        if stage.queue_us:
            yield from _pair("waits", stage.rank, step.step, stage.arrived_us, stage.begun_us)
        is_tail = place + 1 == len(step.stages)
        after_us = step.answered_us if is_tail else step.stages[place + 1].arrived_us
        if len(step.stages) > 1:
            yield from _pair("wire", stage.rank, step.step, stage.done_us, after_us)


def _span(
    name: str, pid: int, tid: int, begin_us: int, end_us: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": "compute" if pid != _REQUESTS else "request",
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": max(0, end_us - begin_us),
        "args": dict(facts),
    }


def _pair(kind: str, pid: int, step: int, begin_us: int, end_us: int) -> Iterator[dict[str, Any]]:
    """Yield both ends of what may overlap with others of its kind."""
    shared = {"cat": kind, "name": kind, "id": f"{pid}.{step}", "pid": pid, "tid": 2}
    yield {"ph": "b", "ts": begin_us, "args": {"step": step}, **shared}
    yield {"ph": "e", "ts": max(begin_us, end_us), **shared}


def _step(step: TracedStep) -> TraceStep:
    told = asdict(step)
    stages = convert(told.pop("timings"), tuple[StageSpan, ...], from_attributes=True)
    return TraceStep(**told, stages=stages)
