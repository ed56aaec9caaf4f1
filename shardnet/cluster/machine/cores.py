"""The cores that this process may use, in equal groups, and the limits of its container.

Elsewhere a group is a number of threads alone.

The system's own figures are those of the whole machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

CPUS: Final = Path("/sys/devices/system/cpu")
NODES: Final = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Core:
    """A core as the system counts them, sorted by what it shares with others.

    `memory` is its NUMA node, `physical` the first core that shares its arithmetic units.
    """

    memory: int
    physical: int
    number: int


def read_cores(cpus: Path = CPUS, nodes: Path = NODES) -> tuple[Core, ...]:
    """Read the cores that this process may use, neighbours together; none but on Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    memory_of = {
        number: int(folder.name.removeprefix("node"))
        for folder in sorted(nodes.glob("node[0-9]*"))
        for number in _numbers(folder / "cpulist")
    }
    cores = []
    for number in os.sched_getaffinity(0):
        siblings = _numbers(cpus / f"cpu{number}" / "topology" / "thread_siblings_list")
        physical = min(siblings, default=number)
        cores.append(Core(memory=memory_of.get(number, 0), physical=physical, number=number))
    return tuple(sorted(cores))


def group_cores(cores: Iterable[Core], n_groups: int) -> tuple[tuple[int, ...], ...]:
    """Divide cores into equal groups and return the numbers of each.

    Groups are NUMA nodes, or equal parts of them, where their number allows it. What cannot be
    divided equally is left out; fewer cores than groups are shared.
    """
    ordered = sorted(cores)
    if not ordered:
        return ((),) * n_groups
    nodes = [
        [core for core in ordered if core.memory == memory]
        for memory in sorted({core.memory for core in ordered})
    ]
    if n_groups % len(nodes):
        nodes = [ordered]
    n_parts = n_groups // len(nodes)
    size = min(len(node) for node in nodes) // n_parts
    if not size:
        return tuple((ordered[index % len(ordered)].number,) for index in range(n_groups))
    return tuple(
        tuple(sorted(core.number for core in node[i * size : (i + 1) * size]))
        for node in nodes
        for i in range(n_parts)
    )


def _numbers(path: Path) -> list[int]:
    """Read a list such as 0-3,8; empty where the system does not say."""
    try:
        text = path.read_text("ascii", "replace").strip()
        found: list[int] = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except (OSError, ValueError):
        return []
    return found


ROOT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
_UNLIMITED: Final = 1 << 60
"""A version 1 group without a limit says a number above this."""


def container_free_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that this process's groups leave it, None without a limit.

    That is the limit less what is in use; the page cache of files, which is given back when memory
    is short, counts as free.
    """
    free = [_free_v2(folder) for folder in _folders(root, membership, "")]
    free += [_free_v1(folder) for folder in _folders(root / "memory", membership, "memory")]
    return min((max(0, n_bytes) for n_bytes in free if n_bytes is not None), default=None)


def container_limit_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that this process's groups may use in all, None without a limit."""
    limits = [_limit_v2(folder) for folder in _folders(root, membership, "")]
    limits += [_limit_v1(folder) for folder in _folders(root / "memory", membership, "memory")]
    return min((limit for limit in limits if limit is not None), default=None)


def container_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the cores whose time this process's groups leave it, None without a limit."""
    cores = [_cores_v2(folder) for folder in _folders(root, membership, "")]
    for name in ("cpu", "cpu,cpuacct"):
        for folder in _folders(root / name, membership, "cpu"):
            cores.append(
                _share(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
            )
    return min((n_cores for n_cores in cores if n_cores is not None), default=None)


def group_folders(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """List the folders of this process's group of version 2, and of those above it."""
    return _folders(root, membership, "")


def _folders(mounted: Path, membership: Path, controller: str) -> Iterator[Path]:
    """List the folders of this process's group and those above it, of one controller.

    `controller` is "" in version 2.
    """
    return iter(_folders_of(mounted, _text(membership), controller))


@lru_cache(maxsize=16)
def _folders_of(mounted: Path, membership: str, controller: str) -> tuple[Path, ...]:
    """Take the membership apart once, not at each question for memory.

    In a container of its own the group's folder is the mounted one, whatever path it says.
    """
    group = PurePosixPath("/")
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(",") and path.startswith("/") and ".." not in path:
            group = PurePosixPath(path)
    parts = [part for part in (group, *group.parents) if part != PurePosixPath("/")]
    return (mounted, *(mounted / part.relative_to("/") for part in parts))


def _free_v2(folder: Path) -> int | None:
    limit, used = _limit_v2(folder), _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    return limit - used + _of(folder / "memory.stat", "inactive_file")


def _free_v1(folder: Path) -> int | None:
    limit, used = _limit_v1(folder), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _of(folder / "memory.stat", "total_inactive_file")


def _limit_v2(folder: Path) -> int | None:
    """Return the limit of a group: beyond `high` it is slowed down until it hardly runs."""
    limits = (_number(folder / "memory.max"), _number(folder / "memory.high"))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v1(folder: Path) -> int | None:
    limit = _number(folder / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def _cores_v2(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return _share(quota, period)


def _share(quota: str, period: str) -> float | None:
    """Divide a quota by its period; None for "max", -1 and what is no number."""
    with contextlib.suppress(ValueError):
        quota_us, period_us = int(quota), int(period)
        if quota_us > 0 and period_us > 0:
            return quota_us / period_us
    return None


def _number(path: Path) -> int | None:
    """Read a number, None for "max" and where there is no such file."""
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return None


def _of(path: Path, name: str) -> int:
    """Read the number after `name` in a file of names and numbers, 0 without one."""
    for line in _text(path).splitlines():
        word, _, number = line.partition(" ")
        if word == name and number.isdecimal():
            return int(number)
    return 0


def _text(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read() or b"").decode("ascii", "replace").strip()
    except OSError:
        return ""
