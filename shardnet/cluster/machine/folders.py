"""Where shardnet stores its files on this machine: configuration, cache, register of nodes.

$SHARDNET_* variables name a path themselves. Otherwise it is shardnet's folder below the $XDG_*
one, on every system, and without that the one of platformdirs. A relative $XDG_* is ignored, as the
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
"""Folder of packed weights in the cache (stage/packs/pack_cache.py)."""
PREFIXES_FOLDER: Final = "prefixes"
ADAPTERS_FOLDER: Final = "adapters"
"""LoRA adapters, in the folder of the models that came from other nodes."""
"""Folder of finished prompts in the cache (stage/prefixes)."""
_NAME: Final = "shardnet"
_PROBE_BYTES: Final = 1 << 16


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder of files that can be made again: figures, runs, weights."""
    if environment.get(CACHE_DIR_VARIABLE):
        return Path(environment[CACHE_DIR_VARIABLE])
    return _in_xdg("XDG_CACHE_HOME", environment) or platformdirs.user_cache_path(
        _NAME, appauthor=False
    )


def config_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the configuration file."""
    if CONFIG_VARIABLE in environment:
        return Path(environment[CONFIG_VARIABLE])
    return _config_dir(environment) / "config.toml"


def default_key_path(environment: Mapping[str, str]) -> Path:
    """Return the default path of the cluster key file."""
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
    """Return why `folder` cannot be written, "" if it can. Creates the folder if need be."""
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
