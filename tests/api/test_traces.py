"""Traces as files: every stage's part of a step stands where it happened."""

from __future__ import annotations

import json
from typing import Any

from shardnet.api.traces import RequestTrace, chrome_trace
from shardnet.wire.messages.activity import MAX_TRACED_STEPS, TracedStep, TracePiece
from shardnet.wire.messages.extras import StageTiming


def piece(*steps: TracedStep, **changes: Any) -> TracePiece:
    values: dict[str, Any] = {
        "request": 1,
        "nodes": ["anna", "bert"],
        "clocks_within_us": [0, 40],
        "submitted_us": 1000,
        "steps": list(steps),
    }
    return TracePiece(**values | changes)


PROMPT = TracedStep(
    7, 0, 5, 1, 5, 1100, 2000, [StageTiming(0, 300, 50, 1100), StageTiming(1, 200, 0, 1600)]
)
TOKEN = TracedStep(
    8, 5, 1, 1, 3, 2100, 2500, [StageTiming(0, 100, 0, 2100), StageTiming(1, 90, 0, 2250)]
)


def spans(events: list[dict[str, Any]], pid: int) -> list[tuple[str, int, int]]:
    return [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid]


def pairs(events: list[dict[str, Any]], name: str) -> list[tuple[str, int, int]]:
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e" and e["name"] == name}
    begins = [e for e in events if e["ph"] == "b" and e["name"] == name]
    assert len(ends) == len(begins)
    return [(e["id"], e["ts"], ends[e["id"]]) for e in begins]


def test_a_step_is_seen_on_every_node_and_between_them() -> None:
    trace = RequestTrace.of(piece(PROMPT))
    trace.add(piece(TOKEN))
    made = chrome_trace({"one": trace})
    events = made["traceEvents"]
    assert spans(events, 0) == [("5 rows", 150, 300), ("3 rows", 1100, 100)]
    assert spans(events, 1) == [("5 rows", 600, 200), ("3 rows", 1250, 90)]
    assert pairs(events, "waits") == [("0.7", 100, 150)]
    assert pairs(events, "wire") == [
        ("0.7", 450, 600),
        ("1.7", 800, 1000),
        ("0.8", 1200, 1250),
        ("1.8", 1340, 1500),
    ]
    assert spans(events, 1000) == [("waits", 0, 100), ("prompt", 100, 900), ("tokens", 1000, 500)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0: anna", 1: "rank 1: bert", 1000: "requests"}
    assert made["otherData"]["clocks_within_us"] == {"anna": 0, "bert": 40}
    assert json.loads(json.dumps(made)) == made


def test_requests_that_share_a_step_show_it_once() -> None:
    traces = {name: RequestTrace.of(piece(PROMPT)) for name in ("one", "two")}
    events = chrome_trace(traces)["traceEvents"]
    assert len(spans(events, 0)) == 1
    assert len(spans(events, 1000)) == 6


def test_no_more_steps_are_kept_than_a_head_traces() -> None:
    trace = RequestTrace.of(piece())
    for _ in range(MAX_TRACED_STEPS // 256 + 1):
        trace.add(piece(*[TOKEN] * 256))
    assert len(trace.steps) == MAX_TRACED_STEPS
