"""The folder of prompt prefixes on disk: one small file for a block of positions of one stage.

Knows files, digests and the limit. Must not know tensors, slots or how blocks are chained.

A folder belongs to everything that decides what a stage computes: its identity. In it a file is
named by the key of its block, which stands for all tokens up to the block's end. A file is written
whole or not at all, and read only if its digest is right: otherwise it is deleted. Several
processes may share a folder: nothing is changed in place, and what one deletes is missing for the
others.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_128

from shardnet.files import (
    ABOUT,
    CacheFolder,
    DiskShare,
    cache_folders,
    cache_places,
    make_own_folder,
    note_model,
    open_own,
    replacing,
    sweep_cache,
)

_log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Counts up when the layout of a file or of a block changes."""
KEEP_FREE_BYTES: Final = 1 << 30
"""Bytes of the disk that prefixes leave to others, whatever their limit."""
_HEADER: Final = struct.Struct("<4sIQ16s16s")  # magic, format, payload bytes, key, digest
_MAGIC: Final = b"snkv"
_PIECE_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    size_bytes: int
    used_ns: int


class PrefixStore:
    """The prefixes of all stages below `folder`, of at most `limit_bytes` together.

    Nothing here raises but OSError where that is said.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """As far as this process has seen: others may write as well."""
        self.bytes_per_s = 0.0
        """How fast blocks were read and checked, 0 while none was."""

    def of_stage(self, identity: str, model: str, layers: str) -> StageFolder:
        """Return the folder of a stage; `model` and `layers` name it for people."""
        name = hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:32]
        self.used_bytes = sum(file.size_bytes for file in _files(self.folder))
        return StageFolder(self, self.folder / name, {"model": model, "layers": layers})

    def make_room(self, n_bytes: int, keep: Collection[Path], *, all_or_none: bool = False) -> int:
        """Delete the files not used for longest, but those of `keep`, until `n_bytes` more fit.

        Returns how many bytes may be added now, which may be fewer; with `all_or_none` no file is
        deleted then. Raises OSError.
        """
        sweep_cache(self.folder)
        files = sorted(_files(self.folder), key=lambda file: file.used_ns)
        free_bytes = shutil.disk_usage(self.folder).free - KEEP_FREE_BYTES
        share = DiskShare(
            used_bytes=sum(file.size_bytes for file in files),
            free_bytes=free_bytes,
            limit_bytes=self.limit_bytes,
        )

        kept_bytes = sum(file.size_bytes for file in files if file.path in keep)
        most_bytes = min(share.limit_bytes, share.used_bytes + share.free_bytes) - kept_bytes

        def delete(file: _File) -> int | None:
            if file.path in keep:
                return None
            with contextlib.suppress(OSError):
                file.path.unlink()
                return file.size_bytes
            return None

        if n_bytes <= most_bytes or not all_or_none:
            share.evict(n_bytes, files, delete)
        self.used_bytes = share.used_bytes
        return max(0, min(share.limit_bytes - share.used_bytes, share.free_bytes))

    def measured(self, n_bytes: int, seconds: float) -> None:
        """Learn how fast blocks are read: the mean of this time and of all before."""
        rate = n_bytes / max(seconds, 1e-6)
        self.bytes_per_s = rate if not self.bytes_per_s else (self.bytes_per_s + rate) / 2


class StageFolder:
    """The files of one stage. See PrefixStore.of_stage."""

    def __init__(self, store: PrefixStore, folder: Path, about: dict[str, str]) -> None:
        self.store = store
        self._folder = folder
        self._about = about

    def path(self, key: bytes, part: str) -> Path:
        """Return the file of a part of a block."""
        return self._folder / f"{key.hex()}.{part}"

    def names(self) -> set[str]:
        """List the names of all files here."""
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folder))
        return set()

    def begin(self) -> None:
        """Create the folder unless it is there. Raises OSError."""
        make_own_folder(self.store.folder)
        note_model(self._folder, self._about)

    def write(self, path: Path, key: bytes, payload: memoryview) -> None:
        """Write one file. Raises OSError."""
        header = _HEADER.pack(_MAGIC, FORMAT, len(payload), key, xxh3_128(payload).digest())
        with replacing(path) as file:
            file.write(header)
            for begin in range(0, len(payload), _PIECE_BYTES):
                piece = payload[begin : begin + _PIECE_BYTES]
                while piece:
                    piece = piece[file.write(piece) :]
        self.store.used_bytes += _HEADER.size + len(payload)

    def read(self, path: Path, key: bytes, payload: memoryview) -> bool:
        """Fill `payload` from a file; return whether all of it came and is undamaged.

        A file that is damaged, or of another size or key, is deleted.
        """
        try:
            with os.fdopen(open_own(path), "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                n_read = 0
                while n_read < len(payload) and (n := file.readinto(payload[n_read:])):
                    n_read += n
                is_all = n_read == len(payload) and not file.read(1)
        except OSError:
            return False
        expected = _HEADER.pack(_MAGIC, FORMAT, len(payload), key, xxh3_128(payload).digest())
        if is_all and header == expected:
            return True
        _log.warning("%s is damaged and was deleted: its positions are computed again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def touch(self, paths: Sequence[Path]) -> None:
        """Mark files as used now, the first of them last: they are deleted in reverse order."""
        now_ns = time.time_ns()
        for place, path in enumerate(paths):
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now_ns - place * 1000, now_ns - place * 1000))
        with contextlib.suppress(OSError):
            os.utime(self._folder / ABOUT)


def stored_prefixes(folder: Path) -> list[CacheFolder]:
    """List the prefixes of stages below `folder`, most recently used first."""
    return cache_folders(
        folder, "layers", lambda place: sum(file.size_bytes for file in _files_in(place))
    )


def _files(folder: Path) -> Iterator[_File]:
    for place in cache_places(folder):
        yield from _files_in(place)


def _files_in(place: Path) -> Iterator[_File]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name == ABOUT:
                continue
            with contextlib.suppress(OSError):  # another process has finished or deleted it
                status = entry.stat(follow_symlinks=False)
                yield _File(
                    path=Path(entry.path), size_bytes=status.st_size, used_ns=status.st_mtime_ns
                )
