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
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from io import FileIO

Entry = TypeVar("Entry")

OWNER_ONLY = 0o600
MAX_OWN_BYTES = 16 << 20
"""Largest file that `read_own` reads."""
ABOUT = "about.json"
"""The file that says whose a folder of a cache is; its time is when the folder was used."""
_MAX_ABOUT_BYTES = 1 << 16
_GONE = ".gone-"
"""Prefix of a folder that is being deleted."""


def expanded(path: str | Path) -> Path:
    """Return a path with its `~` replaced; of a user who is not there it stays a name.

    Path.expanduser raises RuntimeError for such a one, which no message of a file names.
    """
    return Path(os.path.expanduser(path))


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
                missing.mkdir(mode=0o700, exist_ok=True)
    check_own_folder(folder)


def check_own_folder(folder: Path) -> None:
    """Raise NotOwnError for a folder in which another user may replace what this one writes.

    The system's own folders, and those where everyone keeps what is theirs like /tmp, are none.
    Raises OSError if it is missing.
    """
    seen, meant = os.lstat(folder), os.stat(folder)
    if {seen.st_uid, meant.st_uid} - {_user(meant), 0}:
        raise NotOwnError(folder, "it belongs to another user")
    if meant.st_mode & stat.S_IWOTH and not meant.st_mode & stat.S_ISVTX:
        raise NotOwnError(folder, "all users may write in it")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user; with O_CREAT it is made for this user alone (mode 600).

    Returns the descriptor. Raises NotOwnError for a link, for what is no regular file, and for a
    file that belongs to another user or that others may write; OSError. Never waits for a pipe.
    """
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | safe | getattr(os, "O_BINARY", 0), OWNER_ONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError(path, "it is a link") from error
        raise
    try:
        check_own(os.fstat(descriptor), path)
    except NotOwnError:
        os.close(descriptor)
        raise
    return descriptor


def check_own(found: os.stat_result, path: Path) -> None:
    """Raise NotOwnError unless `found`, the status of `path`, is a file of this user alone.

    One of the system's administrator will do as well.
    """
    if not stat.S_ISREG(found.st_mode):
        raise NotOwnError(path, "it is no regular file")
    if found.st_uid not in (_user(found), 0):
        raise NotOwnError(path, "it belongs to another user")
    if hasattr(os, "getuid") and found.st_mode & stat.S_IWOTH:
        raise NotOwnError(path, "all users may write it")


def read_own(path: Path, most_bytes: int = MAX_OWN_BYTES) -> bytes:
    """Return the content of a file as `open_own` opens it. Raises OSError also if it is larger."""
    with os.fdopen(open_own(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def _user(found: os.stat_result) -> int:
    """Return the id of this user; where the system has none, the owner that was found."""
    return os.getuid() if hasattr(os, "getuid") else found.st_uid


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """Give an unbuffered file, for its owner alone, that takes the place of `path` at the end.

    Readers see the old content or the new. After any exception the old file is still there and
    nothing is left of the new one. Raises OSError, also where the folder is missing.
    """
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
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
    with replacing(path) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        if mode != OWNER_ONLY and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), mode)
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
            os.rename(self.folder, gone)
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
