"""Files on this machine's disk: the user's alone, written whole or not at all; shares of caches.

Knows how a file is replaced in one step, when another user could have made or changed it, and which
entries of a cache go first. Must not know what is in them.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from shardnet.permissions import make_private_file, make_private_folder, others_at

if TYPE_CHECKING:
    from io import FileIO

Entry = TypeVar("Entry")

OWNER_ONLY = 0o600
MAX_OWN_BYTES = 16 << 20
"""Largest file that `read_own` reads."""
ABOUT = "about.json"
"""The file that says whose a folder of a cache is; its time is when the folder was used."""
_MAX_ABOUT_BYTES = 1 << 16
_LONG: Final = 180
"""Characters from which on a folder's path is long: names below it may have 80."""
_GONE = ".gone-"
"""Prefix of a folder that is being deleted."""


def expanded(path: str | Path) -> Path:
    """Return a path with its `~` replaced; of a user who is not there it stays a name.

    Path.expanduser raises RuntimeError for such a one, which no message of a file names. On Windows
    a long path is made absolute, see `extended`.
    """
    named = os.path.expanduser(path)
    return Path(extended(os.path.abspath(named), named) if os.name == "nt" else named)


def extended(full: str, named: str) -> str:
    """Return a path of Windows as it is opened however long it is, `named` where it is short.

    `full` is the absolute path. Names of files are added to it. Without the prefix Windows opens
    paths of more than 260 characters only where its registry says so.
    """
    if len(full) < _LONG or full.startswith("\\\\?\\"):
        return named
    is_share = full.startswith("\\\\")
    return f"\\\\?\\UNC\\{full[2:]}" if is_share else f"\\\\?\\{full}"


def text_encoding(beginning: bytes, unmarked: str = "utf-8") -> str:
    """Return the encoding of a text by the byte order mark with which editors on Windows begin it.

    It decodes no mark. A text without one is `unmarked`.
    """
    if beginning[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return "utf-8-sig" if beginning.startswith(codecs.BOM_UTF8) else unmarked


def decode_text(content: bytes, errors: str = "strict") -> str:
    """Decode a text that a person wrote; see `text_encoding`. Raises UnicodeDecodeError."""
    return content.decode(text_encoding(content), errors)


def read_text(path: Path, most_characters: int = -1) -> str:
    """Read the beginning of such a text, or all of it. Raises OSError, UnicodeDecodeError."""
    with (
        path.open("rb") as file,
        io.TextIOWrapper(file, encoding=text_encoding(file.peek(3))) as text,
    ):
        return text.read(most_characters)


class NotOwnError(PermissionError):
    """A file or folder that another user could have made or may change."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{why}, so that somebody else may choose what it says")
        self.filename = str(path)


def make_own_folder(folder: Path) -> None:
    """Create a folder and those above it that are missing, for their owner alone (mode 700).

    Raises NotOwnError as `check_own_folder`, and OSError.
    """
    if not folder.is_dir():
        for missing in reversed([folder, *folder.parents]):
            if not missing.exists():
                with suppress(FileExistsError):  # another process was faster
                    make_private_folder(missing)
    check_own_folder(folder)


def check_own_folder(folder: Path) -> None:
    """Raise NotOwnError for a folder in which another user may replace what this one writes.

    The system's own folders, and those where everyone keeps what is theirs like /tmp, are none.
    Raises OSError if it is missing.
    """
    others = others_at(folder)
    if others.own_it:
        raise NotOwnError(folder, "it belongs to another user")
    if others.may_write and not os.stat(folder).st_mode & stat.S_ISVTX:
        raise NotOwnError(folder, "all users may write in it")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user; with O_CREAT it is made for this user alone (mode 600).

    Returns the descriptor. Raises NotOwnError for a link, for what is no regular file, and for a
    file that belongs to another user or that others may write; OSError. Never waits for a pipe.
    """
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    if flags & os.O_CREAT:
        with suppress(FileExistsError):
            os.close(make_private_file(path))
    try:
        if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):
            raise NotOwnError(path, "it is a link")
        descriptor = os.open(path, flags | safe | getattr(os, "O_BINARY", 0), OWNER_ONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError(path, "it is a link") from error
        raise
    try:
        check_own(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_own(descriptor: int, path: Path) -> None:
    """Raise NotOwnError unless an open file, that of `path`, is a regular one of this user alone.

    One of the system's administrator will do as well.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise NotOwnError(path, "it is no regular file")
    others = others_at(descriptor)
    if others.own_it:
        raise NotOwnError(path, "it belongs to another user")
    if others.may_write:
        raise NotOwnError(path, "all users may write it")


def read_own(path: Path, most_bytes: int = MAX_OWN_BYTES) -> bytes:
    """Return the content of a file as `open_own` opens it. Raises OSError also if it is larger."""
    with os.fdopen(open_own(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


_IN_USE: Final = (5, 32, 33, 1224)
"""Codes of Windows for a file that a program has open, has locked or has mapped."""
_PAUSES_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16)


def rename(source: Path, target: Path) -> None:
    """Move a file over another, or a folder. Raises OSError.

    Windows refuses that while any program has one of them open. Virus scanners and indexers do so
    for a moment with all that is new, so it is tried again for a third of a second. This thread
    sleeps meanwhile, on no other system.
    """
    _insist(lambda: os.replace(source, target))


def delete(path: Path) -> None:
    """Delete a file, if it is there. Raises OSError; tries as long as `rename`."""
    _insist(lambda: path.unlink(missing_ok=True))


def _insist(change: Callable[[], None]) -> None:
    for pause_s in _PAUSES_S:
        try:
            return change()
        except OSError as error:
            if getattr(error, "winerror", None) not in _IN_USE:
                raise
        time.sleep(pause_s)
    return change()


if sys.platform == "win32":
    import ctypes
    import msvcrt

    from shardnet import windows

    _LOCKED: Final = 33
    _NO_WAIT, _ALONE = 0x1, 0x2
    _FAR: Final = 1 << 62
    """A byte that no file has: what is locked there cannot be read by others."""

    def try_lock(file: int, *, is_shared: bool) -> bool:
        """Lock an open file; return False if another has locked it, alone or, for that, at all.

        Locks belong to the open file and end with it, within one process as well. Raises OSError.
        """
        handle = windows.Handle(msvcrt.get_osfhandle(file))
        place = ctypes.create_string_buffer(struct.pack("@PPQP", 0, 0, _FAR, 0))
        flags = _NO_WAIT | (0 if is_shared else _ALONE)
        lock = windows.library("kernel32").LockFileEx
        try:
            return bool(windows.checked(lock(handle, flags, 0, 1, 0, place)))
        except OSError as error:
            if error.winerror != _LOCKED:
                raise
            return False

else:
    import fcntl

    def try_lock(file: int, *, is_shared: bool) -> bool:
        """Lock an open file; return False if another has locked it, alone or, for that, at all.

        Locks belong to the open file and end with it, within one process as well. Raises OSError.
        """
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def replacing(path: Path, *, mode: int = OWNER_ONLY) -> Iterator[FileIO]:
    """Give an unbuffered file that takes the place of `path` at the end.

    It is for its owner alone, unless `mode` says otherwise; on Windows it then inherits from its
    folder. Readers see the old content or the new. After any exception the old file is still there
    and nothing is left of the new one. Raises OSError, also where the folder is missing.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    if mode == OWNER_ONLY:
        made = make_private_file(unfinished)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        made = os.open(unfinished, flags, mode)
    try:
        with os.fdopen(made, "wb", buffering=0) as file:
            yield file
            if mode != OWNER_ONLY and hasattr(os, "fchmod"):  # whatever the umask
                os.fchmod(file.fileno(), mode)
        rename(unfinished, path)
    except BaseException:
        with suppress(OSError):
            delete(unfinished)
        raise


def write_whole(
    path: Path, content: bytes, *, mode: int = OWNER_ONLY, is_durable: bool = False
) -> None:
    """Replace a file in one step, making its folder where that is missing.

    With `is_durable` the content is on the disk before it has its name. Raises OSError, also for a
    folder where another user could replace it (a `mode` for others goes into any folder that is
    there); then the old file is still there.
    """
    if mode == OWNER_ONLY:
        make_own_folder(path.parent)
    with replacing(path, mode=mode) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        if is_durable:
            os.fsync(file.fileno())


def made_once(folder: Path, key: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` gives, or gave for `key` before: `folder` keeps it, where it can.

    A file that is damaged, or not this user's, counts as none.
    """
    path = folder / hashlib.sha256(key.encode()).hexdigest()[:32]
    with suppress(OSError):
        kept = read_own(path)
        if hashlib.sha256(kept[32:]).digest() == kept[:32]:
            return kept[32:]
    made = make()
    with suppress(OSError):
        write_whole(path, hashlib.sha256(made).digest() + made)
    return made


@dataclass(slots=True, kw_only=True)
class DiskShare:
    """What a cache takes of its disk: `used_bytes` of at most `limit_bytes`, `free_bytes` left."""

    used_bytes: int
    free_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, share: float, *, used_bytes: int, free_bytes: int) -> DiskShare:
        """Allow a cache this share of what the disk has free beside it."""
        limit_bytes = int((free_bytes + used_bytes) * share)
        return cls(used_bytes=used_bytes, free_bytes=free_bytes, limit_bytes=limit_bytes)

    def exceeds_limit(self, n_bytes: int) -> bool:
        """Say whether `n_bytes` more would exceed the limit."""
        return self.used_bytes + n_bytes > self.limit_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Say whether `n_bytes` more fit within the limit and on the disk."""
        return not self.exceeds_limit(n_bytes) and n_bytes <= self.free_bytes

    def evict(
        self, n_bytes: int, oldest_first: Iterable[Entry], delete: Callable[[Entry], int | None]
    ) -> list[Entry]:
        """Delete entries until `n_bytes` more fit, or none is left; return those deleted.

        `delete` returns how many bytes it freed, None for an entry that has to stay.
        """
        deleted = []
        for entry in oldest_first:
            if self.has_room(n_bytes):
                break
            freed = delete(entry)
            if freed is not None:
                self.used_bytes -= freed
                self.free_bytes += freed
                deleted.append(entry)
        return deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """What a cache has of one model, in a folder of its own. `used_s` is seconds since 1970.

    `form` is what it has of it: how weights are quantised, or of which layers prompts are.
    """

    folder: Path
    model: str
    form: str
    size_bytes: int
    used_s: float

    def remove(self) -> bool:
        """Delete it; return whether it is gone.

        It is renamed first, so a process that is still writing to it finds no folder.
        """
        gone = self.folder.with_name(f"{_GONE}{os.getpid()}-{self.folder.name}")
        with suppress(OSError):  # another process was faster
            rename(self.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        return not self.folder.exists()


def note_model(folder: Path, about: Mapping[str, str]) -> None:
    """Say in a folder of a cache whose it is, unless that is said already. Raises OSError."""
    if not (folder / ABOUT).exists():
        write_whole(folder / ABOUT, json.dumps(about).encode())


def cache_folders(cache: Path, form_key: str, size_of: Callable[[Path], int]) -> list[CacheFolder]:
    """List the folders of a cache, most recently used first; `form_key` is noted in each."""
    found = []
    for place in cache_places(cache):
        about = place / ABOUT
        with suppress(OSError, ValueError):
            noted = json.loads(read_own(about, _MAX_ABOUT_BYTES))
            match noted:
                case {"model": str(model)} if isinstance(form := noted.get(form_key), str):
                    size_bytes, used_s = size_of(place), about.stat().st_mtime
                    found.append(
                        CacheFolder(
                            folder=place,
                            model=model,
                            form=form,
                            size_bytes=size_bytes,
                            used_s=used_s,
                        )
                    )
    return sorted(found, key=lambda one: -one.used_s)


def cache_places(cache: Path) -> list[Path]:
    """List what is in a cache's folder and is not being deleted."""
    return [place for place in cache.glob("*") if not place.name.startswith(_GONE)]


def sweep_cache(cache: Path) -> None:
    """Delete what a process that died while deleting has left."""
    for left in cache.glob(f"{_GONE}*"):
        shutil.rmtree(left, ignore_errors=True)
