"""The journal of a replica: which parts of which tensors a folder has, with their digests.

A replica is a folder with the layout of a checkpoint and some of its tensors; its tensor files are
sparse. Knows the journal's file, JSON lines that several processes may append to. Must not know
tensor files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec

from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.errors import CheckpointError
from shardnet.types import WEIGHT_PART_BYTES

JOURNAL_FILE: Final = "replica.jsonl"

MAX_JOURNAL_BYTES: Final = 256 << 20
"""Cap on a journal; that of a model of 700 GB has about 30 MB."""
MAX_LINE_BYTES: Final = 1 << 20
"""Cap on a line; the longest has the stamps of all files."""

FileStamp = tuple[int, int]
"""A file's size (bytes) and modification time (ns)."""

_Sha256 = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Line(msgspec.Struct):
    """One line of a journal; which fields it has tells what it records."""

    tensor: str | None = None
    part: _Number | None = None
    sha256: _Sha256 | None = None
    samples: dict[str, _Sha256] | None = None
    seal: dict[str, tuple[_Number, int]] | None = None


_LINE: Final = msgspec.json.Decoder(_Line)


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
        for line in _lines(path):
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
            entry = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        match entry:
            case _Line(tensor=str(tensor), part=int(part), sha256=str(sha256)):
                self.digests.setdefault(tensor, {})[part] = sha256
            case _Line(tensor=str(tensor), part=int(part)):
                self.n_dropped += 1
                self.digests.get(tensor, {}).pop(part, None)
            case _Line(samples=dict(samples)):
                self.samples = samples
            case _Line(seal=dict(seals)):
                self.seals |= seals


def _lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a journal. Raises CheckpointError for a longer one than is written."""
    with BufferedReader(open_file(path)) as file:
        if file.seek(0, 2) > MAX_JOURNAL_BYTES:
            raise CheckpointError(f"{path}: more than {MAX_JOURNAL_BYTES} bytes")
        file.seek(0)
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise CheckpointError(f"{path}: a line of more than {MAX_LINE_BYTES} bytes")
            yield line
