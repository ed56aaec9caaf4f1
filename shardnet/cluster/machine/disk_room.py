"""Checks that a disk has room before anything is written to it.

Knows how much space stays free for other programs. Must not know what is written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from shardnet.errors import ShardnetError

LEFT_FREE_BYTES: Final = 64 << 20
"""Space that is always left free for other programs."""


def check_room(
    what: str, n_bytes: int, folder: Path, *, else_do: str, error: type[ShardnetError]
) -> None:
    """Raise `error` if the disk of `folder`, which may not exist yet, has no room for `n_bytes`.

    `what` is the subject of the message; `else_do` its remedy besides making room, in the
    imperative.
    """
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free_bytes = max(0, shutil.disk_usage(place).free - LEFT_FREE_BYTES)
    if n_bytes > free_bytes:
        raise error(
            f"{what} needs {n_bytes / 2**30:.1f} GiB more in {folder} and "
            f"{free_bytes / 2**30:.1f} GiB are free",
            remedy=f"make room, or {else_do}",
        )
