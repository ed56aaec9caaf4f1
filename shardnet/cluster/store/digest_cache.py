"""Cache the digests of checkpoint parts on disk, until their file changes.

Knows the cache file, one per checkpoint folder. Must not know links. One thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from shardnet.checkpoint.replica import TensorFiles, TensorPart
from shardnet.checkpoint.replica_journal import FileStamp
from shardnet.files import make_own_folder, open_own, read_own

MAX_BYTES = 1 << 28
"""Largest cache file that is read: a million parts."""


class DigestCache:
    """SHA-256 of parts, in hex. An entry is valid while its file has the same stamp."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], tuple[str, FileStamp]] = {}
        with contextlib.suppress(OSError):
            for line in read_own(path, MAX_BYTES).split(b"\n"):
                self._take(line)

    @classmethod
    def for_checkpoint(cls, cache: Path, folder: Path) -> DigestCache:
        """Open the digests of the checkpoint `folder`, stored below the folder `cache`."""
        name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
        return cls(cache / "digests" / f"{name[:32]}.jsonl")

    def digest(self, part: TensorPart, files: TensorFiles) -> str:
        """Return the digest of a part, computed from `files` unless it is cached.

        Raises CheckpointError if the part cannot be read. A digest that cannot be stored is no
        error: it is computed again.
        """
        stamp = files.stamp(part.file)
        known = self._known.get((part.tensor, part.number))
        if known is not None and known[1] == stamp:
            return known[0]
        sha256 = files.digest(part)
        if files.stamp(part.file) == stamp:
            self._put(part, sha256, stamp)
        return sha256

    def _put(self, part: TensorPart, sha256: str, stamp: FileStamp) -> None:
        entry = {"tensor": part.tensor, "part": part.number, "sha256": sha256, "stamp": stamp}
        line = b"\n" + json.dumps(entry).encode()
        self._take(line)
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_own(self._path, flags), "ab", buffering=0) as file:
                file.write(line)

    def _take(self, line: bytes) -> None:
        """Apply one line; skip an unfinished one."""
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case {
                    "tensor": str(tensor),
                    "part": int(part),
                    "sha256": str(sha256),
                    "stamp": [int(size), int(time_ns)],
                }:
                    self._known[tensor, part] = (sha256, (size, time_ns))
