"""Open the files of a checkpoint: regular files that lie in its folder, and nothing else.

Knows links, the layout of the Hub's cache, and special files. Nothing is opened to find out what it
is: a FIFO would block, a device may act. Must not know formats.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardnet.errors import CheckpointError, telling_shortages

MAX_ENTRIES: Final = 1 << 16
"""Cap on the entries of a checkpoint's folder."""

_FLAGS: Final = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
_FOLDER_FLAGS: Final = (
    getattr(os, "O_PATH", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
)
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link in a circle",
}
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)
_DEVICE: Final = re.compile(r"(?i)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?")
"""Names of devices on Windows, in every folder and with any suffix."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a file are: below the folder `base`, by way of no link."""

    base: str
    parts: tuple[str, ...]
    status: os.stat_result


def is_file_name(name: str) -> bool:
    """Say whether a name from elsewhere is that of a file in its folder on every system.

    Windows has two separators, drives (C:), streams (name:stream), devices in every folder, and
    leaves out dots and spaces at the end.
    """
    return (
        name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and bool(name)
        and not name.endswith((".", " "))
        and not _DEVICE.fullmatch(name)
    )


def find_file(path: Path) -> os.stat_result | None:
    """Return the status of a checkpoint's file, None if it is missing.

    `path` is the file in its checkpoint's folder. Raises CheckpointError, which names it, for
    anything but a regular file, and for a symbolic link that leaves the folder. Of the Hub's cache,
    a link to the blobs of the same model stays inside. A hard link cannot be told from the file.
    Raises OSError where the folder cannot be read, ShortageError where this machine cannot.
    """
    place = _locate(path)
    return place.status if place is not None else None


def has_file(path: Path) -> bool:
    """Return whether a checkpoint's file is there. Raises CheckpointError as `find_file` does."""
    try:
        return find_file(path) is not None
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}", remedy="let this user read the folder"
        ) from error


def open_file(path: Path, *, writable: bool = False) -> io.FileIO:
    """Open a checkpoint's file, unbuffered, for reading or for both.

    Raises CheckpointError and ShortageError as `find_file` does, reading too; OSError if it is
    missing or cannot be opened.
    """
    place = _locate(path)
    if place is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with telling_shortages(path.name):
        number = _open(place, os.O_RDWR if writable else os.O_RDONLY)
    try:
        _refuse_special(path, os.fstat(number))  # it may have been replaced since
        return _File(number, path.name, "r+b" if writable else "rb")
    except BaseException:
        os.close(number)
        raise


class _File(io.FileIO):
    """A file whose reading tells this machine's failure from the file's."""

    def __init__(self, number: int, what: str, mode: str) -> None:
        super().__init__(number, mode)
        self._what = what

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as FileIO."""
        with telling_shortages(self._what):
            return super().read(-1 if size is None else size)

    def readinto(self, into: Any, /) -> int:
        """Read as FileIO."""
        with telling_shortages(self._what):
            return super().readinto(into)


def folder_entries(folder: Path) -> list[str]:
    """List the names in a checkpoint's folder, at most MAX_ENTRIES, sorted.

    Raises CheckpointError if there are more, OSError if the folder cannot be read, ShortageError
    where this machine cannot.
    """
    names: list[str] = []
    with telling_shortages(folder.name), os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_ENTRIES:
                raise CheckpointError(
                    f"{folder} holds more than {MAX_ENTRIES} entries: it is no checkpoint",
                    remedy="move the checkpoint into a folder of its own",
                )
    return sorted(names)


def _locate(path: Path) -> _Place | None:
    try:
        with telling_shortages(path.name):
            status = os.lstat(path)
        if not stat.S_ISLNK(status.st_mode):
            place = _Place(str(path.parent), (path.name,), status)
        else:
            base, parts = _follow(path)
            place = _Place(base, parts, os.lstat(os.path.join(base, *parts)))
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise CheckpointError(
            f"{str(path)!r:.200} cannot be the name of a file", remedy="fetch the checkpoint again"
        ) from error
    _refuse_special(path, place.status)
    return place


def _follow(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the folder that a link stays in, and the names from there to its target."""
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    repo = _hub_repo(folder)
    for base, inside in ((folder, folder), (repo, repo / "blobs" if repo is not None else None)):
        if base is not None and inside in target.parents:
            return str(base), target.relative_to(base).parts
    raise CheckpointError(
        f"{path} is a link that leaves the checkpoint's folder",
        remedy="put the file itself in its place",
    )


def _hub_repo(folder: Path) -> Path | None:
    """Return models--NAME of the Hub's cache if `folder` is its snapshots/REVISION[/…]."""
    for snapshot in (folder, *folder.parents):
        repo = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repo.name.startswith("models--"):
            return repo
    return None


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(
            f"{path} is {kind}, expected a regular file", remedy="fetch the checkpoint again"
        )


def _open(place: _Place, mode: int) -> int:
    """Open a file by steps that follow no link, also where a folder is replaced meanwhile."""
    if os.open not in os.supports_dir_fd:
        return os.open(os.path.join(place.base, *place.parts), mode | _FLAGS)
    with contextlib.ExitStack() as folders:
        at = os.open(place.base, os.O_RDONLY | _FOLDER_FLAGS)
        folders.callback(os.close, at)
        for part in place.parts[:-1]:
            at = os.open(part, os.O_RDONLY | _FOLDER_FLAGS | _FLAGS, dir_fd=at)
            folders.callback(os.close, at)
        return os.open(place.parts[-1], mode | _FLAGS, dir_fd=at)
