"""Where the cache is, and files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from support.full_disk import full_disk

from shardnet.cluster.machine.folders import cache_dir, why_not_written
from shardnet.files import write_whole


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of Linux")
def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/shardnet")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir({}) == Path("/h/.cache/shardnet")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir(os.environ) == Path("/h/.cache/shardnet")
    assert cache_dir({"SHARDNET_CACHE_DIR": "here", "XDG_CACHE_HOME": "/c"}) == Path("here")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_failure_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(IsADirectoryError):
        write_whole(path, b"x")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    assert why_not_written(tmp_path / "new") == ""
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_not_written(tmp_path / "file" / "cache") == "Not a directory"


def test_a_full_disk_is_told_and_gets_nothing(tmp_path: Path) -> None:
    with full_disk(1000):
        assert why_not_written(tmp_path) == "File too large"
    assert [*tmp_path.iterdir()] == []
