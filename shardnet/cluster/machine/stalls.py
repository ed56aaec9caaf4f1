"""How long programs of this machine had to wait for memory lately, Linux only.

Knows the kernel's pressure files, of the system and of the groups of this process. Must not judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shardnet.cluster.machine.container import MEMBERSHIP, ROOT, group_folders

SYSTEM: Final = Path("/proc/pressure/memory")


def memory_stalled(
    system: Path = SYSTEM, root: Path = ROOT, membership: Path = MEMBERSHIP
) -> float | None:
    """Return the share of the last 10 s in which some program waited for memory, 0 to 1.

    It is that of the system, or of a group that this process is in where that is more. None where
    the kernel does not say.
    """
    files = [system, *(folder / "memory.pressure" for folder in group_folders(root, membership))]
    found = [share for file in files if (share := _some(file)) is not None]
    return max(found, default=None)


def _some(file: Path) -> float | None:
    try:
        lines = file.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        kind, _, fields = line.partition(" ")
        for field in fields.split():
            name, _, value = field.partition("=")
            if (kind, name) == ("some", "avg10") and value.replace(".", "", 1).isdecimal():
                return min(1.0, float(value) / 100)
    return None
