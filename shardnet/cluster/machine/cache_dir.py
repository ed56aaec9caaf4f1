"""The folder in which shardnet keeps what it can make again: figures, runs, weights.

Knows where the folder is, and how to put a small file there whole or not at all. Must not know what
the files say.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

CACHE_DIR_VARIABLE = "SHARDNET_CACHE_DIR"

_PROBE_BYTES = 1 << 16

PACKS_FOLDER = "packed"
"""Where in the folder rounded weights are kept (stage/pack_cache.py)."""


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder: $SHARDNET_CACHE_DIR, else shardnet's place in $XDG_CACHE_HOME or ~/.cache.

    It may not exist. A relative $XDG_CACHE_HOME does not count, as the XDG specification asks.
    """
    if environment.get(CACHE_DIR_VARIABLE):
        return Path(environment[CACHE_DIR_VARIABLE])
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "shardnet"
    home = environment.get("HOME", "")
    return (Path(home) if home else Path.home()) / ".cache" / "shardnet"


def why_not_written(folder: Path) -> str:
    """Say why nothing can be kept in `folder`, "" where it can. Makes the folder if need be."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        write_whole(probe, bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file for its owner alone, so that whoever reads it sees the old content or the new.

    Makes the folder where it is missing. Raises OSError when that or writing fails; then the old
    file is still there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
