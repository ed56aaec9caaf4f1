"""Reads the files of a tokenizer within size limits.

Knows the limits and the errors of unreadable files. Must not know what files mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shardnet.errors import CheckpointError

MAX_FILE_BYTES: Final = 64 << 20
"""Limit of a tokenizer's file; the largest known has 33 MB."""

_AGAIN = "fetch the file again"
_LFS_POINTER = b"version https://git-lfs"


def read_bytes(path: Path, cap: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of at most `cap` bytes.

    Raises CheckpointError if it cannot be read, is larger, or is a Git LFS pointer.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > cap:
            raise CheckpointError(
                f"{path} has {size_bytes} bytes, at most {cap} are read",
                remedy=_AGAIN,
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            remedy=_AGAIN,
        ) from error
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file",
            remedy="run `git lfs pull`",
        )
    return data


def read_object(path: Path, *, distinct: bool = False) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing.

    Raises CheckpointError for anything else, with `distinct` also for duplicate keys.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_bytes(path), object_pairs_hook=_distinct if distinct else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {error}",
            remedy=_AGAIN,
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r:.80} is there twice")
        found[key] = value
    return found
