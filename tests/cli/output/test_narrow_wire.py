"""What `plan` says of a narrower wire, in words and JSON."""

from __future__ import annotations

from typing import Any

import pytest

from shardnet.wire.messages.plans import (
    NarrowWire,
    NodeProgress,
    PlannedStage,
    PlanReply,
    WireError,
)
from shardnet_cli.output.plan_text import WireBar, narrow_wire_json, narrow_wire_words

ERROR = WireError(n_rows=64, n_changed=2, max_error=0.0312, rms_error=0.00891, kl=0.000212)


def wire(**changes: Any) -> NarrowWire:
    fields = {
        "row_bytes": 4352,
        "exact_row_bytes": 8192,
        "saves_ms": 0.9,
        "error": ERROR,
        "why": "",
    }
    return NarrowWire(**fields | changes)


def plan(n_stages: int = 2, **changes: Any) -> PlanReply:
    fields: dict[str, Any] = {
        "request": 1,
        "model": "/m",
        "model_id": "ab",
        "dtype": "bfloat16",
        "wire_dtype": "int8",
        "context": 512,
        "predicted_tok_s": 90.0,
        "why": "",
        "stages": [
            PlannedStage(
                rank=rank,
                node="n",
                name="n",
                address="n:1",
                layers=(rank, rank + 1),
                weight_bytes=1,
                kv_bytes=1,
            )
            for rank in range(n_stages)
        ],
    }
    return PlanReply(**fields | changes)


ERROR_WORDS = (
    "logits off by at most 0.031 of their spread (0.0089 rms, KL 0.0002), "
    "2 of 64 likeliest tokens differ"
)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (wire(), f"saves 0.9 ms of 12 ms per token at these links; {ERROR_WORDS}"),
        (
            wire(saves_ms=-0.05),
            "loses 0.05 ms of 11 ms per token at these links: quantising takes longer than it "
            f"saves; {ERROR_WORDS}",
        ),
        (
            wire(saves_ms=None),
            f"time saved unknown, as not all links are measured; {ERROR_WORDS}",
        ),
        (
            wire(error=None, why="there is no checkpoint folder at /m"),
            "saves 0.9 ms of 12 ms per token at these links; error not measured: there is no "
            "checkpoint folder at /m",
        ),
    ],
)
def test_words(told: NarrowWire, words: str) -> None:
    size = "wire int8: 4.4 instead of 8.2 kB per token and hop, "
    assert narrow_wire_words(plan(), told) == size + words


def test_where_nothing_is_rounded_the_reason_is_enough() -> None:
    nothing = wire(error=None, saves_ms=0.0, why="the plan has one stage")
    assert narrow_wire_words(plan(1), nothing) == "wire int8: the plan has one stage"
    own = wire(error=None, saves_ms=0.0, why="nothing is rounded")
    assert narrow_wire_words(plan(wire_dtype="bfloat16"), own) == (
        "wire bfloat16: nothing is rounded"
    )


def test_json() -> None:
    assert narrow_wire_json(None) == {"wire_error": None, "wire_saves_ms": None, "wire_why": ""}
    told = narrow_wire_json(wire())
    assert told["wire_saves_ms"] == 0.9
    assert told["wire_error"] == {
        "n_rows": 64,
        "n_changed": 2,
        "max_error": 0.0312,
        "rms_error": 0.00891,
        "kl": 0.000212,
    }


def test_measuring_is_said_once_and_only_when_it_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with WireBar("int8"):
        pass
    assert capsys.readouterr().err == ""
    with WireBar("int8") as bar:
        for done in (0, 5 * 10**8, 10**9):
            bar.update(NodeProgress(request=1, rank=0, done_bytes=done, total_bytes=10**9))
    assert capsys.readouterr().err == (
        "measuring the error of wire dtype int8: the head reads the whole checkpoint, 1 GB\n"
    )
