"""What is said while a ring is made, where standard error is no terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardnet.wire.messages.plans import NodeProgress, PlannedStage, PlanReply
from shardnet_cli.main import app
from shardnet_cli.output.bars import make_bars
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


def test_a_bar_shows_what_is_known_and_no_question_marks() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = make_bars(has_rate=True, console=terminal)
    for done, total in ((0, None), (3 * 2**20, None), (2**20, 2**21)):
        bars.add_task("work", total=total, completed=done)
    with terminal.capture() as shown:
        terminal.print(bars.get_renderable())
    text = shown.get()
    assert "?" not in text
    assert "-:--" not in text
    assert "3.0 MiB" in text
    assert "1.0/2.0 MiB" in text


def test_a_fetch_is_said_once_with_its_size_and_about_how_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = PlannedStage(
        rank=0,
        node="n",
        name="anna",
        address="a:1",
        layers=(0, 8),
        weight_bytes=1,
        kv_bytes=1,
        fetch_bytes=3 * 2**20,
        fetch_s=12.3,
        fetch_from=["bert"],
    )
    plan = PlanReply(
        request=1,
        model="/m",
        model_id="ab" * 32,
        dtype="bfloat16",
        wire_dtype="bfloat16",
        context=512,
        stages=[stage],
        why="because",
    )
    with LoadBars() as bars:
        bars.expect(plan)
        for done in (0, 2**20):
            bars.update(
                NodeProgress(
                    request=1, rank=0, done_bytes=done, total_bytes=3 * 2**20, phase="fetching"
                )
            )
    assert capsys.readouterr().err.splitlines() == [
        "ring: anna layers 0-7 of 8 (bfloat16, context 512): because",
        "anna layers 0-7 of 8: fetching 3.0 MiB from other nodes, about 12 s",
    ]
