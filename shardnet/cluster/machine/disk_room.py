"""Check that a disk has room before anything is written to it.

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
    """Raise `error` if the disk of `folder`, which may not exist yet, has no room for `n_bytes`.

    The message names `what` needs the room; `else_do` is the alternative to making some.
    """
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free_bytes = max(0, shutil.disk_usage(place).free - LEFT_FREE_BYTES)
    if n_bytes > free_bytes:
        raise error(
            f"{what} needs {n_bytes / 2**30:.1f} GiB more in {folder} and "
            f"{free_bytes / 2**30:.1f} GiB are free",
            remedy=f"make room, or {else_do}",
        )
