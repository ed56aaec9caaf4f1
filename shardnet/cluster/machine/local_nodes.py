"""The register of this machine's nodes: a folder with one small file per running node.

Knows the folder, that no other user may write there, and which entries belong to a live process.
Commands find the node to ask here, and nodes how many of them share the cores. Must not connect to
the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shardnet.cluster.machine.folders import RUNTIME_DIR_VARIABLE
from shardnet.errors import ConfigurationError
from shardnet.files import NotOwnError, make_own_folder, read_own, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node process on this machine. `started` is its process's start time, seconds since 1970."""

    node: str
    name: str
    address: str
    pid: int
    started: float


class LocalNodes:
    """The register of this machine's nodes in `folder`.

    Every method raises ConfigurationError if another user can write in the folder: that user could
    choose which node gets the prompts, and which files are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, *, node: str, name: str, address: str, pid: int) -> LocalNode:
        """Register the node process `pid`, listening at `address` (host:port).

        The folder is created for its owner alone (mode 700). Raises OSError if it cannot be
        written, and psutil.NoSuchProcess if there is no such process; then nothing is left there.
        """
        started = psutil.Process(pid).create_time()
        entry = LocalNode(node=node, name=name, address=address, pid=pid, started=started)
        with contextlib.suppress(NotOwnError):  # said with a remedy below
            make_own_folder(self._folder)
        self._check_ours()
        write_whole(self._path(entry), json.dumps(asdict(entry)).encode())
        return entry

    def remove(self, entry: LocalNode) -> None:
        """Remove an entry, if it is there."""
        self._path(entry).unlink(missing_ok=True)

    def list(self) -> list[LocalNode]:
        """List the nodes whose processes live, oldest first; delete the files of dead ones."""
        self._check_ours()
        found = []
        for path in sorted(self._folder.glob("*.json")):
            entry = _read(path)
            if entry is not None and _lives(entry):
                found.append(entry)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return sorted(found, key=lambda entry: (entry.started, entry.pid))

    def _check_ours(self) -> None:
        """Raise ConfigurationError unless the folder, and the link to it if any, is this user's."""
        try:
            seen, meant = os.lstat(self._folder), os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise ConfigurationError(
                f"the folder {self._folder} of this machine's nodes cannot be read "
                f"({error.strerror})",
                remedy=f"name another with {RUNTIME_DIR_VARIABLE}",
            ) from error
        if hasattr(os, "getuid") and (
            {seen.st_uid, meant.st_uid} != {os.getuid()} or meant.st_mode & stat.S_IWOTH
        ):
            raise ConfigurationError(
                f"another user can write in {self._folder}, where this machine's nodes are "
                "registered",
                remedy=f"delete it, or name another folder with {RUNTIME_DIR_VARIABLE}",
            )

    def _path(self, entry: LocalNode) -> Path:
        return self._folder / f"{entry.node}.json"


def share_of_cores(n_cores: int, n_nodes: int) -> int:
    """Return the threads for each of `n_nodes` nodes on a machine of `n_cores`, at least one."""
    return max(1, n_cores // max(1, n_nodes))


def _read(path: Path) -> LocalNode | None:
    try:
        return LocalNode(**json.loads(read_own(path)))
    except (OSError, ValueError, TypeError):  # half-written, another version's, or gone
        return None


def _lives(entry: LocalNode) -> bool:
    try:
        return abs(psutil.Process(entry.pid).create_time() - entry.started) < 1.0
    except psutil.Error:
        return False
