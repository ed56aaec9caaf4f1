"""Keep the plan and the timing of the last generation that was led on this machine.

Knows the file, so that the last run outlives its process. Must not know how a run is made or shown.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardnet.files import read_own, write_whole
from shardnet.wire.messages.generation import LastRun

FILE_NAME = "last_run.json"

_decoder = msgspec.json.Decoder(LastRun)


def write_last_run(folder: Path, run: LastRun) -> None:
    """Write `run` to the cache `folder`. Raises OSError if it cannot be written."""
    write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(run)))


def read_last_run(folder: Path) -> LastRun | None:
    """Return the last run of this machine, None if there is none.

    A file that is damaged or of another version counts as none.
    """
    try:
        return _decoder.decode(read_own(folder / FILE_NAME))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
