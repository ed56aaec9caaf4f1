"""Files that another user could have made, or may change, are refused by name."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest

from shardnet import files
from shardnet.files import (
    NotOwnError,
    check_own_folder,
    delete,
    extended,
    make_own_folder,
    open_own,
    read_own,
    rename,
    write_whole,
)
from shardnet.permissions import Others, read_descriptor

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


# --- as Windows says it

ME, OTHER = "S-1-5-21-1-2-3-1001", "S-1-5-21-1-2-3-1002"
SYSTEM, ADMINISTRATORS = "S-1-5-18", "S-1-5-32-544"
EVERYONE, USERS, AUTHENTICATED = "S-1-1-0", "S-1-5-32-545", "S-1-5-11"
FULL, READ, MODIFY, ADD = 0x1F01FF, 0x1200A9, 0x1301BF, 0x4
ALLOW, DENY, AUDIT, ALLOW_OBJECT = 0, 1, 2, 5
Entry = tuple[int, int, str]


def sid(text: str) -> bytes:
    _, revision, authority, *parts = text.split("-")
    head = bytes([int(revision), len(parts)]) + int(authority).to_bytes(6, "big")
    return head + struct.pack(f"<{len(parts)}I", *map(int, parts))


def descriptor(owner: str, entries: list[Entry] | None) -> bytes:
    """Write a self-relative security descriptor; None is the absence of a list."""
    listed, owned = b"", sid(owner)
    for kind, rights, whom in entries or ():
        guid = struct.pack("<I", 1) + bytes(16) if kind == ALLOW_OBJECT else b""
        body = struct.pack("<I", rights) + guid + sid(whom)
        listed += struct.pack("<BBH", kind, 0x3, 4 + len(body)) + body
    head = struct.pack("<BBHHH", 2, 0, 8 + len(listed), len(entries or ()), 0)
    has = entries is not None
    control, list_at = (0x8004, 20 + len(owned)) if has else (0x8000, 0)
    return struct.pack("<BBHIIII", 1, 0, control, 20, 0, 0, list_at) + owned + head + listed


@pytest.mark.parametrize(
    ("entries", "may_read", "may_write"),
    [
        ([], False, False),
        ([(ALLOW, FULL, who) for who in (SYSTEM, ADMINISTRATORS, ME, "S-1-3-4")], False, False),
        ([(ALLOW, FULL, ME), (ALLOW, READ, USERS)], True, False),
        ([(ALLOW, READ, OTHER)], True, False),
        ([(ALLOW, MODIFY, AUTHENTICATED)], True, True),
        ([(ALLOW, FULL, EVERYONE)], True, True),
        ([(ALLOW, ADD, USERS)], False, True),
        ([(ALLOW, 0x40000, USERS)], True, True),  # who may change the list gives himself the rest
        ([(ALLOW_OBJECT, FULL, USERS)], True, True),
        ([(DENY, FULL, EVERYONE), (AUDIT, FULL, EVERYONE)], False, False),
        ([(ALLOW, FULL, "S-1-15-2-1"), (ALLOW, FULL, "S-1-15-3-1024-1")], False, False),
        (None, True, True),
    ],
)
def test_an_access_list_says_what_others_may(
    entries: list[Entry] | None, may_read: bool, may_write: bool
) -> None:
    expected = Others(own_it=False, may_read=may_read, may_write=may_write)
    assert read_descriptor(descriptor(ME, entries), ME) == expected


@pytest.mark.parametrize("owner", [ME, SYSTEM, ADMINISTRATORS, OTHER, USERS])
def test_an_owner_may_be_this_user_or_an_administrator(owner: str) -> None:
    assert read_descriptor(descriptor(owner, []), ME).own_it is (owner in (OTHER, USERS))


@pytest.mark.parametrize("n_bytes", [0, 10, 19, 30, 60])
def test_a_damaged_descriptor_is_no_answer(n_bytes: int) -> None:
    whole = descriptor(ME, [(ALLOW, FULL, ME), (ALLOW, FULL, EVERYONE)])
    with pytest.raises((struct.error, IndexError, ValueError)):
        read_descriptor(whole[:n_bytes], ME)


class Busy:
    """A call that Windows refuses `n_times` with a code."""

    def __init__(self, n_times: int, code: int) -> None:
        self.left, self.code, self.n_calls = n_times, code, 0

    def __call__(self, *args: object, **more: object) -> None:
        self.n_calls += 1
        if self.left:
            self.left -= 1
            error = PermissionError(13, "in use")
            error.winerror = self.code  # type: ignore[attr-defined]
            raise error


@pytest.mark.parametrize("code", [5, 32, 1224])
def test_a_file_that_a_scanner_has_open_is_replaced_and_deleted_a_moment_later(
    mine: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(files, "_PAUSES_S", (0.0, 0.0, 0.0))
    for name, change in (
        ("replace", lambda: rename(mine, mine.with_name("other"))),
        ("unlink", lambda: delete(mine)),
    ):
        busy = Busy(3, code)
        monkeypatch.setattr(files.os if name == "replace" else Path, name, busy)
        change()
        assert busy.n_calls == 4
        monkeypatch.setattr(files.os if name == "replace" else Path, name, stuck := Busy(9, code))
        with pytest.raises(PermissionError):
            change()
        assert stuck.n_calls == 4


def test_other_refusals_are_not_tried_again(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "replace", full := Busy(9, 112))
    with pytest.raises(PermissionError):
        write_whole(mine, b"y")
    assert full.n_calls == 1
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("begin", "prefixed"),
    [
        ("C:\\", "\\\\?\\C:\\"),
        ("\\\\nas\\models\\", "\\\\?\\UNC\\nas\\models\\"),
        ("\\\\?\\C:\\", ""),
    ],
)
def test_a_long_path_of_windows_gets_its_prefix(begin: str, prefixed: str) -> None:
    assert extended(f"{begin}short", "short") == "short"
    long = "x" * 300
    assert extended(begin + long, "named") == (prefixed + long if prefixed else "named")
