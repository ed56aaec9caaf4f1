"""Whether a disk has room for what is to be written, said before it is.

Knows how much is left free for others. Must not know what is written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from shardnet.errors import ShardnetError

LEFT_FREE_BYTES: Final = 64 << 20
"""A disk is never filled beyond: other programs write too."""


def check_room(
    what: str, n_bytes: int, folder: Path, *, else_do: str, error: type[ShardnetError]
) -> None:
    """Raise `error` where `folder`, which may be yet to make, has no room for so many more bytes.

    The message names what has no room; `else_do` is what helps beside making some.
    """
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free_bytes = max(0, shutil.disk_usage(place).free - LEFT_FREE_BYTES)
    if n_bytes > free_bytes:
        raise error(
            f"{what} needs {n_bytes / 2**30:.1f} GiB more in {folder} and "
            f"{free_bytes / 2**30:.1f} GiB are free: make room, or {else_do}"
        )
