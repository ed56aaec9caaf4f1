"""The register of this machine's nodes: a folder with one small file per running node.

Knows the folder, that no other user may write there, and which entries belong to a live process.
Commands find the node to ask here, and nodes how many of them share the cores. Containers and
machines may share the folder, and then each sees its own nodes alone. Must not connect to the
nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from shardnet.cluster.machine.folders import RUNTIME_DIR_VARIABLE
from shardnet.errors import ConfigurationError
from shardnet.files import NotOwnError, delete, make_own_folder, read_own, write_whole
from shardnet.permissions import others_at
from shardnet.runtime.processors.processor_use import NO_FIGURE

TOUCH_S: Final = 60.0
"""How old a node lets its entry become."""
STALE_S: Final = 600.0
"""An entry of another place that is older belongs to no node that runs."""

UNKNOWN_S: Final = -1.0
"""Stands for a start that an entry does not tell."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD: Final = 19
"""Of what /proc/PID/stat says behind the name of a process: its start, in ticks of the system."""
_PROCESSES: Final = "/proc/self/ns/pid"
_NETWORK: Final = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node process on this machine. `started` is when its process began; see `_started`.

    `place` is where `pid` and a loopback `address` mean this process; see `this_place`.
    """

    node: str
    name: str
    address: str
    pid: int
    started: float
    place: str


def this_place() -> str:
    """Return what is equal for processes that see each other's ids and loopback addresses.

    That is the boot of the machine and, on Linux, the namespaces of the container.
    """
    return _inside(_PROCESSES, _NETWORK)


def this_network() -> str:
    """Return what is equal for processes that see each other's loopback addresses."""
    return _inside(_NETWORK)


def _inside(*namespaces: str) -> str:
    try:
        return " ".join([_BOOT_ID.read_text().strip(), *map(os.readlink, namespaces)])
    except OSError:  # no Linux
        return socket.gethostname()


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
        started = _started(pid)
        entry = LocalNode(
            node=node, name=name, address=address, pid=pid, started=started, place=this_place()
        )
        self._write(entry)
        return entry

    def keep(self, entry: LocalNode, address: str) -> LocalNode:
        """Keep the entry of a node that runs: `address` and place of now, touched once in TOUCH_S.

        Writes it again where somebody has deleted it. Raises OSError as `add`.
        """
        path = self._path(entry)
        try:
            if time.time() - path.stat().st_mtime > TOUCH_S:
                os.utime(path)
            is_there = True
        except FileNotFoundError:
            is_there = False
        now = replace(entry, address=address, place=this_place())
        if not is_there or now != entry:
            self._write(now)
        return now

    def _write(self, entry: LocalNode) -> None:
        with contextlib.suppress(NotOwnError):  # said with a remedy below
            make_own_folder(self._folder)
        self._check_ours()
        write_whole(self._path(entry), json.dumps(asdict(entry)).encode())

    def remove(self, entry: LocalNode) -> None:
        """Remove an entry, if it is there."""
        delete(self._path(entry))

    def list(self) -> list[LocalNode]:
        """List the nodes of this place whose processes live, oldest first.

        Deletes the files of dead ones, and those of other places that nobody keeps any more.
        """
        self._check_ours()
        found, place = [], this_place()
        for path in sorted(self._folder.glob("*.json")):
            entry = _read(path)
            if entry is not None and entry.place != place:
                lives = _is_kept(path)
            elif lives := entry is not None and _lives(entry, path):
                found.append(entry)
            if not lives:
                with contextlib.suppress(OSError):  # at once: this may be the loop
                    path.unlink()
        return sorted(found, key=lambda entry: (entry.started, entry.pid))

    def _check_ours(self) -> None:
        """Raise ConfigurationError unless the folder, and the link to it if any, is this user's."""
        try:
            others = others_at(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise ConfigurationError(
                f"the folder {self._folder} of this machine's nodes cannot be read "
                f"({error.strerror})",
                remedy=f"name another with {RUNTIME_DIR_VARIABLE}",
            ) from error
        if others.own_it or others.may_write:
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
    """Read an entry; one of another version may lack what is not needed, or have more."""
    known: dict[str, Any] = {"started": UNKNOWN_S, "place": this_place()}
    try:
        entry = msgspec.convert(known | json.loads(read_own(path)), LocalNode)
    except (OSError, ValueError, TypeError, msgspec.ValidationError):  # damaged, or gone
        return None
    return entry if entry.pid > 0 else None


def _is_kept(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < STALE_S
    except OSError:
        return True


def _started(pid: int) -> float:
    """Return when a process began, in seconds: since the system did on Linux, else since 1970.

    Where it can be had it is a time that does not change when the clock is set. Raises
    psutil.NoSuchProcess.
    """
    process = psutil.Process(pid)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, IndexError):
            line = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
            return int(line.rpartition(")")[2].split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return process.create_time()


def _lives(entry: LocalNode, path: Path) -> bool:
    """Say whether the process of an entry runs, and is no other one with its id.

    Versions counted its start otherwise. Where none is known the file has to be younger.
    """
    try:
        starts = _started(entry.pid), psutil.Process(entry.pid).create_time()
        if entry.started == UNKNOWN_S:
            return starts[1] < path.stat().st_mtime + 1.0
        return any(abs(start - entry.started) < 1.0 for start in starts)
    except NO_FIGURE:
        return False
