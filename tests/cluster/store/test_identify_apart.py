"""Checkpoints with large headers are identified in another process, with the same result."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.hostile.small_files import GOOD, safetensors

from shardnet.cluster.store import local_models as apart
from shardnet.errors import CheckpointError
from shardnet.guard.helper_process import HelperProcess
from shardnet.runtime.loading.model_facts import identify


def make(folder: Path, base: str = "safetensors", **more: bytes) -> Path:
    """Write a good checkpoint, with other content for some files."""
    folder.mkdir()
    for name, content in (GOOD[base]() | more).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("base", list(GOOD))
def test_another_process_says_the_same(base: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", base)
    assert apart.identify_apart(folder) == identify(folder)


def test_only_large_headers_are_read_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(apart, "identify_apart", asked.append)
    apart.identify_guarded(make(tmp_path / "small"))
    assert asked == []
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{n}": entry for n in range(20_000)}).encode()
    large = make(tmp_path / "large", **{"model.safetensors": safetensors(header)})
    gguf = next(iter(make(tmp_path / "gguf", "gguf").glob("*.gguf")))
    with gguf.open("ab") as file:
        file.truncate(apart.LARGE_BYTES + 1)
    for path in (large, gguf):
        apart.identify_guarded(path)
    assert asked == [large, gguf]


def test_an_error_of_the_other_process_is_raised_here(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", **{"config.json": b"{"})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        apart.identify_apart(folder)


def test_a_process_that_is_killed_names_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = HelperProcess._started

    def killed(process: HelperProcess) -> object:
        child = started(process)
        os.kill(process.pid or 0, signal.SIGKILL)
        return child

    monkeypatch.setattr(HelperProcess, "_started", killed)
    folder = make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"{folder}: reading its headers failed"):
        apart.identify_apart(folder)
