"""Read the small files of a checkpoint, JSON above all, within a cap.

Must not know configs, tensors or tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.stored_tensor import AGAIN
from shardnet.errors import CheckpointError

MAX_JSON_BYTES: Final = 100_000_000
_NO_JSON: Final = (json.JSONDecodeError, UnicodeDecodeError)
_LFS_POINTER: Final = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, which names the file, when it is none."""
    return parse_object(read_file(path), path)


def read_file(path: Path, cap: int = MAX_JSON_BYTES) -> bytes:
    """Read a file of at most `cap` bytes.

    Raises CheckpointError when it is missing or larger, or is a Git LFS pointer to the file.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > cap:
            raise CheckpointError(
                f"{path} has {size_bytes} bytes, at most {cap} are read", remedy=AGAIN
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy=AGAIN) from error
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file", remedy="run `git lfs pull`"
        )
    return data


def parse_object(text: bytes, path: Path, *, distinct: bool = False) -> dict[str, Any]:
    """Parse a JSON object that is part of the file `path`.

    Raises CheckpointError where it is none, with `distinct` also for a key that comes twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_distinct if distinct else None)
    except _DuplicateKey as error:
        raise CheckpointError(f"{path}: {error}", remedy=AGAIN) from error
    except (ValueError, RecursionError) as error:
        # Python's words for what is not JSON; any other ValueError is a number of thousands of
        # digits, for which its advice is of no use here.
        is_json = isinstance(error, ValueError) and not isinstance(error, _NO_JSON)
        why = "a number of more than 4300 digits" if is_json else str(error)
        raise CheckpointError(f"{path}: not readable as JSON ({why})", remedy=AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, found {type(value).__name__}", remedy=AGAIN
        )
    return value


class _DuplicateKey(ValueError):
    """A key of an object comes twice."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(f"the key {key!r:.80} is there twice")
        found[key] = value
    return found
