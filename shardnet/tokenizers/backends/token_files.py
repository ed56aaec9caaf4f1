"""Read the files of a tokenizer, within a cap of their own.

Must not know what they mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.json_files import parse_object, read_file

MAX_FILE_BYTES: Final = 64 << 20
"""Limit of a tokenizer's file; the largest known has 33 MB."""


def read_bytes(path: Path, cap: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of at most `cap` bytes. Raises CheckpointError as `read_file` does."""
    return read_file(path, cap)


def read_object(path: Path, *, distinct: bool = False) -> dict[str, Any]:
    """Read a JSON object, {} where the file is missing.

    Raises CheckpointError for anything else, with `distinct` also for duplicate keys.
    """
    return parse_object(read_bytes(path), path, distinct=distinct) if path.is_file() else {}
