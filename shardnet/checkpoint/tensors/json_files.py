"""The JSON files of a checkpoint, read within a cap.

Must not know configs or tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.stored_tensor import AGAIN
from shardnet.errors import CheckpointError

MAX_JSON_BYTES: Final = 100_000_000
_NO_JSON: Final = (json.JSONDecodeError, UnicodeDecodeError)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, which names the file, when it is none."""
    return parse_object(read_file(path), path)


def read_file(path: Path) -> bytes:
    """Read a small file whole. Raises CheckpointError when it is missing or too large."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes; {AGAIN}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {AGAIN}") from error


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object that is part of the file `path`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Python words what is no JSON; a ValueError besides is a number of thousands of digits.
        is_json = isinstance(error, ValueError) and not isinstance(error, _NO_JSON)
        why = "a number of more than 4300 digits" if is_json else str(error)
        raise CheckpointError(f"{path}: not readable as JSON ({why}); {AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; {AGAIN}")
    return value
