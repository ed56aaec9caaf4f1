"""The JSON files of a checkpoint: read within a cap, and the index that names tensor files.

Must not know configs or tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shardnet.errors import CheckpointError
from shardnet.model.stored import AGAIN

MAX_JSON_BYTES: Final = 100_000_000


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
        raise CheckpointError(f"{path}: not readable as JSON ({error}); {AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; {AGAIN}")
    return value


def read_weight_map(index: Path) -> dict[str, str]:
    """Read an index: the file of every tensor, by name.

    Raises CheckpointError when it names none, or one outside its folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty; {AGAIN}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} is in {file!r}, which is no file name")
    return weight_map
