"""Nodes, models, plans and status at a terminal of 80 columns: nothing is torn, nothing lost."""

from __future__ import annotations

import sys

import msgspec
import pytest

from shardnet.wire.messages.membership import ListedModel, ModelsListed, NodeInfo, StageInfo
from shardnet_cli.commands.models import model_lines
from shardnet_cli.commands.nodes import node_lines
from shardnet_cli.output.columns import columns, terminal_width, wrapped

NODE = NodeInfo(
    node="a" * 32,
    name="attic",
    address="192.168.1.10:7433",
    version="0.2.0",
    device="cpu",
    memory_bytes=16 << 30,
    memory_free_bytes=8 << 30,
    cores=1,
    threads=1,
    dtypes=[],
    host_id="h",
    uptime_s=180,
)
STAGE = StageInfo(model="bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", layers=(0, 16), rank=0)


def test_nodes_are_lines_and_long_parts_stand_alone() -> None:
    nodes = [
        NODE,
        msgspec.structs.replace(NODE, name="b" * 40, stage=STAGE),
        msgspec.structs.replace(NODE, name="desk", device="cuda (NVIDIA GeForce RTX 3090)"),
    ]
    assert node_lines(nodes[:1], 80) == [
        "name   address            device  memory free      version  up     stage",
        "attic  192.168.1.10:7433  cpu     8.0 of 16.0 GiB  0.2.0    3 min  -",
    ]
    shown = node_lines(nodes, 80)
    assert max(map(len, shown)) <= 80
    assert "b" * 40 in shown
    assert "    NVIDIA GeForce RTX 3090" in shown
    assert f"    rank 0, layers 0-15 of {STAGE.model}" in shown
    over = msgspec.structs.replace(NODE, stage=msgspec.structs.replace(STAGE, rank=None))
    assert f"    in no ring, layers 0-15 of {STAGE.model}" in node_lines([over], 80)
    assert len(node_lines(nodes, None)) == 4


def test_models_keep_their_names_whole() -> None:
    listed = [
        ListedModel(
            name=name,
            size_bytes=4_920_000_000,
            held_bytes=4_920_000_000,
            store="Ollama",
            family="llama",
            form="Q4_K_M",
            context=131072,
            fits=True,
        )
        for name in ("ollama:qwen3:8b", STAGE.model, "lmstudio:" + "long/" * 15)
    ]
    lists = [
        ModelsListed(request=1, node=f"{name}-id", name=name, models=listed)
        for name in ("attic", "desk", "a-machine-with-a-long-name", "another-one")
    ]
    shown = model_lines(lists, 80)
    assert {one.name for one in listed} <= {line.partition("  ")[0] for line in shown}
    assert sum("attic, desk" in line for line in shown) == 3
    assert all(len(line) <= 80 for line in shown if "long/" not in line)
    assert len(model_lines(lists, None)) == 4


@pytest.mark.parametrize("width", [60, 80])
def test_sentences_are_broken_between_words(width: int) -> None:
    line = (
        "  attic: layer 3.7 ms for 1 token, 110 ms for 256; embedding 0.053 ms, LM head 4.9 ms; "
        "memory 9.50 GiB, disk 1200 MB/s (packed bfloat16, threads: 1, 2026-11-21 02:13)"
    )
    first, *more = wrapped([line], width)
    assert first.startswith("  attic")
    assert all(part.startswith("      ") and part[6] != " " for part in more)
    assert max(map(len, (first, *more))) <= width
    assert " ".join(" ".join([first, *more]).split()) == " ".join(line.split())
    assert wrapped([line, ""], None) == [line, ""]


def test_what_is_no_terminal_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_width() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal_width() == 80


def test_columns_without_room_still_hold_everything() -> None:
    rows = [("name", "size", "where"), ("n" * 30, "1 GiB", "here"), ("m", "2 GiB", "")]
    shown = columns(rows, 20)
    assert shown[1:] == ["n" * 30, "        1 GiB  here", "m       2 GiB"]
