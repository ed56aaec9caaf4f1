"""The cores that this process may use, in equal groups: the devices cpu:0, cpu:1 and so on.

Knows Linux's description of cores: those that share one physical core or one memory (NUMA) stay
together. Elsewhere a group is a number of threads alone. Must not pin anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
        _numbers_of(node[i * size : (i + 1) * size]) for node in nodes for i in range(n_parts)
    )


def _numbers_of(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(core.number for core in cores))


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
