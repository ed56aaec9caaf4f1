"""Files that another user could have made, or may change, are refused by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardnet import files
from shardnet.files import (
    NotOwnError,
    check_own_folder,
    make_own_folder,
    open_own,
    read_own,
    write_whole,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users and modes")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of this user."""
    path = tmp_path / "mine"
    write_whole(path, b"x")
    return path


def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this user has made be another's."""
    monkeypatch.setattr(files.os, "getuid", lambda: os.stat("/").st_uid + 4712)


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "a" / "b" / "file", b"x")
        os.close(open_own(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in sorted(tmp_path.rglob("*"))]
    assert modes == [0o700, 0o700, 0o600, 0o600]
    assert read_own(tmp_path / "a" / "b" / "file") == b"x"


def test_a_link_is_not_followed(mine: Path) -> None:
    link = mine.with_name("link")
    link.symlink_to(mine)
    with pytest.raises(NotOwnError, match="it is a link"):
        read_own(link)
    with pytest.raises(NotOwnError, match="it is a link"):
        open_own(link, os.O_RDWR | os.O_CREAT)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotOwnError, match="no regular file"):
        read_own(tmp_path / "pipe")


def test_a_file_that_all_may_write_or_of_another_is_refused(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.chmod(0o606)
    with pytest.raises(NotOwnError, match="all users may write it"):
        read_own(mine)
    mine.chmod(0o600)
    if not os.getuid():
        os.chown(mine, 4711, -1)
    another(monkeypatch)
    with pytest.raises(NotOwnError, match="belongs to another user"):
        read_own(mine)


def test_a_file_beyond_its_bound_is_refused(mine: Path) -> None:
    assert read_own(mine, 1) == b"x"
    with pytest.raises(OSError, match="more than 0 bytes"):
        read_own(mine, 0)


def test_a_folder_in_which_others_may_write_is_not_written_to(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mine.parent
    folder.chmod(0o707)
    with pytest.raises(NotOwnError, match="all users may write in it"):
        write_whole(folder / "file", b"y")
    folder.chmod(0o1707)  # as /tmp
    write_whole(mine, b"y")
    folder.chmod(0o700)
    check_own_folder(folder)
    if not os.getuid():
        os.chown(folder, 4711, -1)
    another(monkeypatch)
    try:
        with pytest.raises(NotOwnError, match="belongs to another user"):
            make_own_folder(folder)
    finally:
        monkeypatch.undo()
        if not os.getuid():
            os.chown(folder, 0, -1)
