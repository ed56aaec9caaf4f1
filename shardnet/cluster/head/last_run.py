"""The last generation that a machine has led: its plan, and what became of it.

Knows where it is kept: by the head that led it, and in a file, so that it outlives a run without a
node. Must not know how a run is made or shown.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardnet.files import write_whole
from shardnet.wire.messages.generation import LastRun

FILE_NAME = "last_run.json"

_decoder = msgspec.json.Decoder(LastRun)


def write_last_run(folder: Path, run: LastRun) -> None:
    """Keep `run` in the cache `folder`. Raises OSError when it cannot be written."""
    write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(run)))


def read_last_run(folder: Path) -> LastRun | None:
    """Return the run that was led on this machine last, None where none is kept.

    A file that is damaged or another version's counts as none.
    """
    try:
        return _decoder.decode((folder / FILE_NAME).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
