"""Room on a disk, asked for before anything is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardnet.cluster.download import hub
from shardnet.cluster.download.hub import LEFT_FREE_BYTES, check_room
from shardnet.errors import CheckpointError, HubError

GIB = 2**30


def test_what_has_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def disk_usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(free=2 * GIB + LEFT_FREE_BYTES)

    monkeypatch.setattr(hub.shutil, "disk_usage", disk_usage)
    folder = tmp_path / "to" / "make"
    check_room("m", 2 * GIB, folder, else_do="do", error=HubError)
    message = "^m needs 3.0 GiB more in .*make and 2.0 GiB are free; make room, or go away$"
    with pytest.raises(CheckpointError, match=message):
        check_room("m", 3 * GIB, folder, else_do="go away", error=CheckpointError)
    assert asked == [tmp_path, tmp_path], "the nearest folder that is there tells of the disk"
