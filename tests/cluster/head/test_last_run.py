"""The last run, kept in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardnet.cluster.head.last_run import FILE_NAME, read_last_run, write_last_run
from shardnet.wire.messages.generation import LastRun, MeanStageTime, Timing
from shardnet.wire.messages.plans import PlannedStage, PlanReply

RUN = LastRun(
    request=0,
    plan=PlanReply(
        request=0,
        model="/m",
        model_id="ab" * 32,
        dtype="bfloat16",
        wire_dtype="bfloat16",
        context=512,
        stages=[
            PlannedStage(
                rank=0,
                node="n",
                name="anna",
                address="a:1",
                layers=(0, 4),
                weight_bytes=1,
                kv_bytes=2,
                compute_ms=3.0,
            )
        ],
        why="it fits",
    ),
    timing=Timing(
        load_s=0,
        ttft_s=0.1,
        decode_tok_s=10,
        total_s=1,
        per_stage=(MeanStageTime(rank=0, compute_ms=3.5, queue_ms=0.1, wire_ms=0),),
    ),
    n_tokens=7,
    ended_at_s=1.7e9,
)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_last_run(tmp_path) is None
    write_last_run(tmp_path / "new", RUN)
    assert read_last_run(tmp_path / "new") == RUN


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"type": "LastRun"}', b"\xff"])
def test_a_damaged_file_is_no_run(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    assert read_last_run(tmp_path) is None
