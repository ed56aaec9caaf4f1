"""What is said while a ring is made, where standard error is no terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardnet.wire.messages.plans import NodeProgress, PlannedStage, PlanReply
from shardnet_cli.main import app
from shardnet_cli.output.progress import LoadBars


def test_a_node_that_is_waited_for_is_told_once_and_counts_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LoadBars() as bars:
        for n_done in (1, 2):
            bars.update(
                NodeProgress(request=1, rank=0, done_bytes=n_done, total_bytes=2, phase="measuring")
            )
        for _ in range(2):
            bars.update(
                NodeProgress(request=1, rank=1, done_bytes=0, total_bytes=0, phase="waiting")
            )
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "a node: waiting for another head that uses the node\n"


def test_where_quantised_weights_are_kept_is_said_once_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDNET_CACHE_DIR", str(tmp_path))
    stage = PlannedStage(
        rank=0, node="n", name="n", address="", layers=(0, 4), weight_bytes=2**30, kv_bytes=0
    )
    plan = PlanReply(
        request=0,
        model="m",
        model_id="ab" * 32,
        dtype="float32",
        wire_dtype="float32",
        context=512,
        stages=[stage],
        why="",
        quant="int8",
    )
    packs = tmp_path / "packed"
    for _ in range(2):
        with LoadBars() as bars:
            bars.expect(plan)
        (packs / "0123").mkdir(parents=True, exist_ok=True)
    assert capsys.readouterr().err.count(f"(1.00 GiB in all), this machine in {packs}") == 1
    (packs / "0123" / "about.json").write_text('{"model": "m", "quant": "int8"}')
    [listed] = json.loads(CliRunner().invoke(app, ["cache", "ls", "--json"]).stdout)
    assert (listed["model_id"], listed["name"], listed["quant"]) == ("0123", "m", "int8")
