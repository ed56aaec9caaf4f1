"""The file of `generate --trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardnet.api.events import (
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    RequestState,
    Usage,
)
from shardnet.api.traces import RequestTrace
from shardnet.errors import ConfigurationError
from shardnet_cli.commands.generate import TraceFile


def ended(index: int) -> GenerationEvent:
    trace = RequestTrace(
        nodes=("anna",), clocks_within_us=(0,), submitted_us=5, steps=[], n_left_out=1
    )
    result = GenerationResult(
        model="m",
        index=index,
        sample=0,
        prompt_token_ids=(),
        token_ids=(),
        tokens=(),
        text="",
        finish_reason="stop",
        seed=1,
        sample_index=0,
        logprobs=None,
        usage=Usage(n_prompt=1, n_generated=0, n_reused=0),
        timing=GenerationTiming(load_s=0, ttft_s=0, decode_tok_s=0, total_s=0, per_stage=()),
        trace=trace,
    )
    return GenerationEvent(
        request_id=index, index=index, sample=0, state=RequestState.FINISHED, result=result
    )


def test_every_request_is_in_the_file(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t.json"))
    for index in range(2):
        file.take(ended(index))
    file.write()
    told = json.loads((tmp_path / "t.json").read_text())
    named = {e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    assert named == {"prompt 0", "prompt 1"}
    assert told["otherData"]["steps_left_out"] == 2


def test_a_missing_folder_is_said_before_anything_is_generated(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        TraceFile(str(tmp_path / "none" / "t.json"))
