"""A warning before nodes start where the cache folder cannot be written.

Knows the folder and what to do. Must not know what is kept there.
"""

from __future__ import annotations

import os

from shardnet.cluster.machine.folders import CACHE_DIR_VARIABLE, cache_dir, why_not_written

from .exit_codes import say


def warn_of_cache() -> None:
    """Warn where the cache folder cannot be written; nodes work without it, but start slower."""
    folder = cache_dir(os.environ)
    why = why_not_written(folder)
    if why:
        say(
            f"warning: the cache folder {folder} cannot be written ({why}): measured figures and "
            f"quantised weights are not kept; make it writable or make room, or name another with "
            f"{CACHE_DIR_VARIABLE}"
        )
