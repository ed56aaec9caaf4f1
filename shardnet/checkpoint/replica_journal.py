"""The journal of a replica: which parts of which tensors a folder has, with their digests.

A replica is a folder with the layout of a checkpoint and some of its tensors; its tensor files are
sparse. Knows the journal's file, JSON lines that several processes may append to. Must not know
tensor files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from shardnet.errors import CheckpointError
from shardnet.types import WEIGHT_PART_BYTES

JOURNAL_FILE: Final = "replica.jsonl"

FileStamp = tuple[int, int]
"""A file's size (bytes) and modification time (ns)."""


def n_parts(size_bytes: int) -> int:
    """Return the number of parts of a tensor of `size_bytes`."""
    return -(-size_bytes // WEIGHT_PART_BYTES)


class Journal:
    """The content of a replica's journal.

    `digests`: SHA-256 in hex of every part stored, by tensor and number. `seals`: the stamp of each
    tensor file after its last flush to the disk. `n_dropped`: parts dropped since they were damaged
    or superseded. `samples`: SHA-256 in hex of each tensor file's samples when the replica was
    begun; its id is computed from them, whatever tensors it has.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.digests: dict[str, dict[int, str]] = {}
        self.seals: dict[str, FileStamp] = {}
        self.samples: dict[str, str] = {}
        self.n_dropped = 0
        for line in path.read_bytes().split(b"\n"):
            self._take(line)

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Read the journal of a replica, None if `folder` is not one.

        Raises CheckpointError if it cannot be read.
        """
        try:
            return cls(folder / JOURNAL_FILE)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{folder / JOURNAL_FILE}: {error.strerror}") from error

    @classmethod
    def begin(cls, folder: Path, samples: Mapping[str, str]) -> None:
        """Create the journal of a new replica in `folder`. Raises OSError if there is one."""
        with (folder / JOURNAL_FILE).open("xb", buffering=0) as file:
            file.write(json.dumps({"samples": dict(samples)}).encode())

    def record(self, tensor: str, part: int, sha256: str) -> None:
        """Record that a part is stored, with its SHA-256 in hex. Raises OSError."""
        self._append({"tensor": tensor, "part": part, "sha256": sha256})

    def drop(self, tensor: str, part: int) -> None:
        """Record that a part is not stored any more. Raises OSError."""
        self._append({"tensor": tensor, "part": part, "sha256": None})

    def seal(self, stamps: dict[str, FileStamp]) -> None:
        """Record the stamps of tensor files that were flushed to the disk. Raises OSError."""
        self._append({"seal": stamps})

    def _append(self, entry: dict[str, Any]) -> None:
        # The line break goes first: it ends the unfinished line of a killed process.
        line = b"\n" + json.dumps(entry).encode()
        with self._path.open("ab", buffering=0) as file:
            file.write(line)
        self._take(line[1:])

    def _take(self, line: bytes) -> None:
        """Apply one line; skip an unfinished one."""
        try:
            entry = json.loads(line)
        except ValueError:
            return
        match entry:
            case {"tensor": str(tensor), "part": int(part), "sha256": str(sha256)}:
                self.digests.setdefault(tensor, {})[part] = sha256
            case {"tensor": str(tensor), "part": int(part), "sha256": None}:
                self.n_dropped += 1
                self.digests.get(tensor, {}).pop(part, None)
            case {"samples": dict(samples)}:
                self.samples = {str(file): str(sha256) for file, sha256 in samples.items()}
            case {"seal": dict(seals)}:
                self.seals |= {name: (size, time_ns) for name, (size, time_ns) in seals.items()}
