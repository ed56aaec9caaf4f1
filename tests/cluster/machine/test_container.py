"""Limits of containers, read from folders like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardnet.cluster.machine import profile
from shardnet.cluster.machine.cores import (
    container_cores,
    container_free_bytes,
    container_limit_bytes,
)
from shardnet.cluster.machine.profile import Device, MemoryBudget, available_cores

GIB = 1 << 30


def laid(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def free(root: Path) -> int | None:
    return container_free_bytes(root / "fs", root / "membership")


def limit(root: Path) -> int | None:
    return container_limit_bytes(root / "fs", root / "membership")


def cores(root: Path) -> float | None:
    return container_cores(root / "fs", root / "membership")


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert free(tmp_path) is None
    assert cores(tmp_path) is None


def test_version_2_in_a_container(tmp_path: Path) -> None:
    root = laid(
        tmp_path,
        {
            "membership": "0::/",
            "fs/memory.max": 4 * GIB,
            "fs/memory.current": 3 * GIB,
            "fs/memory.stat": f"anon 7\ninactive_file {GIB // 2}\nactive_file 9",
            "fs/cpu.max": "150000 100000",
        },
    )
    assert free(root) == GIB + GIB // 2
    assert limit(root) == 4 * GIB
    assert cores(root) == 1.5
    laid(root, {"fs/memory.high": 3 * GIB})  # beyond it a group is slowed down
    assert free(root) == GIB // 2
    assert limit(root) == 3 * GIB


def test_version_2_the_tightest_of_a_group_and_those_above(tmp_path: Path) -> None:
    root = laid(
        tmp_path,
        {
            "membership": "0::/user.slice/node.scope",
            "fs/user.slice/memory.max": 2 * GIB,
            "fs/user.slice/memory.current": GIB,
            "fs/user.slice/cpu.max": "max 100000",
            "fs/user.slice/node.scope/memory.max": "max",
            "fs/user.slice/node.scope/memory.current": 5,
            "fs/user.slice/node.scope/cpu.max": "200000 100000",
        },
    )
    assert free(root) == GIB
    assert cores(root) == 2


@pytest.mark.parametrize(
    ("group", "below"),
    [("/docker/1234", "docker/1234"), ("/", ""), ("/docker/1234", ""), ("/a/b", "a")],
)
def test_version_1(tmp_path: Path, group: str, below: str) -> None:
    """A container sees its group as the root, whatever it is called; limits above it hold too."""
    root = laid(
        tmp_path,
        {
            "membership": f"9:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:/x",
            "fs/memory/memory.limit_in_bytes": (1 << 63) - 4096,
            "fs/memory/memory.usage_in_bytes": 7,
        },
    )
    assert free(root) is None
    assert limit(root) is None
    laid(
        root,
        {
            f"fs/memory/{below}/memory.limit_in_bytes": GIB,
            f"fs/memory/{below}/memory.usage_in_bytes": 2 * GIB,
            f"fs/cpu,cpuacct/{below}/cpu.cfs_quota_us": 50000,
            f"fs/cpu,cpuacct/{below}/cpu.cfs_period_us": 100000,
        },
    )
    assert free(root) == 0
    assert limit(root) == GIB
    assert cores(root) == 0.5


@pytest.mark.parametrize("content", ["", "0", "max", "-1 100000", "5 0", "x y", "9" * 5000])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, content: str) -> None:
    root = laid(
        tmp_path,
        {"membership": content, "fs/cpu.max": content, "fs/memory.max": content or "x"},
    )
    assert cores(root) is None
    assert free(root) is None
    assert limit(root) in (None, 0)  # whoever may use nothing is not here


def test_a_node_plans_with_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(device=Device(kind="cpu", description="cpu", dtypes=()), asked_bytes=None)
    machine, n_cores = 0, 0
    for bytes_left, share in ((None, None), (1 << 50, 1e6), (4096, 0.2)):
        monkeypatch.setattr(profile, "container_free_bytes", lambda left=bytes_left: left)
        monkeypatch.setattr(profile, "container_cores", lambda share=share: share)
        machine, n_cores = budget.available_bytes(), available_cores()
        assert machine > 4096 or bytes_left == 4096
        assert n_cores >= 1
    assert (machine, n_cores) == (4096, 1)
    asked = MemoryBudget(device=budget.device, asked_bytes=GIB)
    for most, taken in ((None, GIB), (2 * GIB, GIB), (GIB // 2, GIB // 2)):
        monkeypatch.setattr(profile, "container_limit_bytes", lambda most=most: most)
        assert asked.total_bytes(used_bytes=0, n_nodes_here=2) == taken
