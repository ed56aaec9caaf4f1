"""Files on this machine's disk: written whole or not at all, and caches kept within their share.

Knows how a file is replaced in one step, and which entries of a cache go first. Must not know what
is in them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from io import FileIO

Entry = TypeVar("Entry")

OWNER_ONLY = 0o600


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

    With `is_durable` the content is on the disk before it has its name. Raises OSError; then the
    old file is still there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        if mode != OWNER_ONLY and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), mode)
        if is_durable:
            os.fsync(file.fileno())


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
