"""Where shardnet keeps its files on this machine: configuration, cache, register of nodes.

$SHARDNET_* name a place themselves. Otherwise shardnet's folder in the $XDG_* one, on every system,
and without that where platformdirs puts such files here. A relative $XDG_* does not count, as the
XDG specification asks. The folders may not exist.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import platformdirs

from shardnet.files import write_whole

CACHE_DIR_VARIABLE: Final = "SHARDNET_CACHE_DIR"
RUNTIME_DIR_VARIABLE: Final = "SHARDNET_RUNTIME_DIR"
CONFIG_VARIABLE: Final = "SHARDNET_CONFIG"
PACKS_FOLDER: Final = "packed"
"""Where in the cache packed weights are kept (stage/pack_cache.py)."""
_NAME: Final = "shardnet"
_PROBE_BYTES: Final = 1 << 16


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder of what can be made again: figures, runs, weights."""
    if environment.get(CACHE_DIR_VARIABLE):
        return Path(environment[CACHE_DIR_VARIABLE])
    return _in_xdg("XDG_CACHE_HOME", environment) or platformdirs.user_cache_path(
        _NAME, appauthor=False
    )


def config_path(environment: Mapping[str, str]) -> Path:
    """Return the configuration file."""
    if CONFIG_VARIABLE in environment:
        return Path(environment[CONFIG_VARIABLE])
    return _config_dir(environment) / "config.toml"


def default_key_path(environment: Mapping[str, str]) -> Path:
    """Return where the cluster key is kept when no other place is named."""
    return _config_dir(environment) / "cluster.key"


def runtime_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder in which this user's running nodes are registered.

    Without $XDG_RUNTIME_DIR it lies directly in the folder of temporary files: a folder between,
    as platformdirs has it, might be another user's.
    """
    if RUNTIME_DIR_VARIABLE in environment:
        return Path(environment[RUNTIME_DIR_VARIABLE])
    owner = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    in_temporary = Path(tempfile.gettempdir()) / f"{_NAME}-{owner}"
    return _in_xdg("XDG_RUNTIME_DIR", environment) or in_temporary


def why_not_written(folder: Path) -> str:
    """Say why nothing can be kept in `folder`, "" where it can. Makes the folder if need be."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        write_whole(probe, bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _config_dir(environment: Mapping[str, str]) -> Path:
    return _in_xdg("XDG_CONFIG_HOME", environment) or platformdirs.user_config_path(
        _NAME, appauthor=False
    )


def _in_xdg(variable: str, environment: Mapping[str, str]) -> Path | None:
    base = environment.get(variable, "")
    return Path(base) / _NAME if os.path.isabs(base) else None
