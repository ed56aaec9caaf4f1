"""`--device A,B`, `--tensor-parallel N`, and the cores of a group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from support.simulated_device import simulated_device

from shardnet.cluster.machine import cores as system_cores
from shardnet.cluster.machine import profile
from shardnet.cluster.machine.cores import Core, group_cores, read_cores
from shardnet.cluster.machine.device_list import (
    DeviceName,
    parse_devices,
    parse_tensor_parallel,
)
from shardnet.cluster.machine.profile import MEMORY_SHARE, Device, MemoryBudget, find_devices
from shardnet.errors import ConfigurationError, UsageError
from shardnet.model.devices import bits
from shardnet.model.drivers import gpu
from shardnet.model.kernels import devices

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("auto", "auto"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda:1"),
        ("cuda:0, cuda:1", "cuda:0,cuda:1"),
        ("cuda:1,cpu:0", "cuda:1,cpu"),
        ("cuda,cpu", "cuda,cpu"),
        ("mps,cpu", "mps,cpu"),
        ("cpu:1,cuda:0,cpu:0", "cpu:1,cuda:0,cpu:0"),
        ("numpy", "numpy"),
    ],
)
def test_lists_of_devices_are_read(text: str, written: str) -> None:
    assert ",".join(map(str, parse_devices(text, ["numpy"]))) == written


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tpu", "'tpu' is unknown; choose auto, cpu, nvidia, cuda, mps, opencl or numpy"),
        ("cpu:0,tpu:1", "'cpu:0,tpu:1': 'tpu:1' is unknown"),
        ("", "'' is unknown"),
        ("cpu:0,", "'' is unknown"),
        ("cuda:", "'cuda:' has no number; write cuda:0"),
        ("cuda:-1", "has no number"),
        ("cuda:²", "has no number"),
        ("cuda:1024", "is beyond cuda:1023"),
        ("auto,cpu", "auto is no part of a list"),
        ("numpy,cpu", "numpy is no part of a list"),
        ("cuda:1,cuda:1", "a GPU is named twice"),
        ("mps,mps", "a GPU is named twice"),
        ("mps:0", "'mps:0' is unknown"),
        ("cuda,cuda:0", "a GPU is named twice"),
        ("cuda,cuda:1", "which GPU is cuda; give each its number"),
        ("cpu,cpu", "numbered from 0, each once; write cpu:0,cpu:1"),
        ("cpu:1,cpu:2", "numbered from 0, each once; write cpu:0,cpu:1"),
        ("cpu:1", "the only group named; write cpu"),
        (",".join(f"cuda:{n}" for n in range(17)), "17 devices; name at most 16"),
    ],
)
def test_what_is_no_list_of_devices_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_devices(text, ["numpy"])
    assert complaint in str(error.value)


def test_tensor_parallel_divides_the_devices() -> None:
    assert [parse_tensor_parallel(text, 4) for text in ("auto", "1", "2", "4")] == [0, 1, 2, 4]
    for text, remedy in (("3", "give 1 or 2 or 4"), ("8", "give 1 or 2 or 4"), ("0", "auto")):
        with pytest.raises(UsageError, match=remedy):
            parse_tensor_parallel(text, 4)
    with pytest.raises(UsageError, match="1 device is named, which 2 does not divide"):
        parse_tensor_parallel("2", 1)


def test_groups_are_equal_and_keep_neighbours_together() -> None:
    # Two sockets; as usual on x86, siblings are numbered half of all cores apart.
    two = [Core(memory=n % 4 // 2, physical=n % 4, number=n) for n in range(8)]
    assert group_cores(two, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert group_cores(two, 4) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert group_cores(two, 3) == ((0, 4), (1, 5), (2, 6))
    # Taskset has left one socket less: groups stay equal, and on their sockets.
    assert group_cores([core for core in two if core.number != 6], 2) == ((0, 1, 4), (2, 3, 7))
    assert group_cores(two[:1], 3) == ((0,), (0,), (0,))
    assert group_cores([], 2) == ((), ())


def test_cores_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for number, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        write(f"cpu{number}/topology/thread_siblings_list", siblings + "\n")
    write("node0/cpulist", "0,2\n")
    write("node1/cpulist", "1,3\n")
    monkeypatch.setattr(
        system_cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 7}, raising=False
    )
    found = read_cores(tmp_path, tmp_path)
    assert [(core.memory, core.physical, core.number) for core in found] == [
        (0, 0, 0), (0, 0, 2), (0, 7, 7), (1, 1, 1), (1, 1, 3),
    ]  # fmt: skip


def test_devices_that_are_named_are_found_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core(memory=0, physical=n, number=n) for n in range(4)]
    monkeypatch.setattr(profile, "read_cores", lambda: cores)
    groups = find_devices("cpu:1,cpu:0")
    assert [(each.name, each.cores, each.for_torch) for each in groups] == [
        ("cpu:1", (2, 3), "cpu"),
        ("cpu:0", (0, 1), "cpu"),
    ]
    [whole] = find_devices("cpu")
    assert (whole.name, whole.cores) == ("cpu", ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}")
    monkeypatch.setattr(profile, "_good_dtypes", lambda torch_name: ())
    monkeypatch.setattr(profile, "_check_computes", lambda *of_gpu: None)
    two = find_devices("cuda:1,cpu")
    assert [(each.for_torch, each.description) for each in two] == [
        ("cuda:1", "cuda:1 (H1)"),
        ("cpu", "cpu"),
    ]
    assert [each.name for each in find_devices("auto")] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ConfigurationError, match="--device mps: torch finds no GPU of Apple's"):
        find_devices("mps,cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [each.for_torch for each in find_devices("mps,cpu")] == ["mps", "cpu"]
    with pytest.raises(ConfigurationError, match="--device cuda:2: torch finds 2, numbered from"):
        find_devices("cuda:0,cuda:2")


def test_a_gpu_without_kernels_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GTX 1080 with a torch of today: torch finds it, and launches nothing there."""
    linear = F.linear

    def launch(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if rows.device.type == "cuda":
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")
        return linear(rows, weight)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GTX 1080")
    monkeypatch.setattr(devices.F, "linear", launch)
    told: list[str] = []
    with simulated_device():
        [cpu] = find_devices("auto", told.append)
        with pytest.raises(ConfigurationError, match="cannot compute on GTX 1080: CUDA error: no"):
            find_devices("cuda:0")
    assert cpu.name == "cpu"
    [line] = told
    assert "GTX 1080: CUDA error: no kernel image is available; this node computes without" in line


@pytest.mark.parametrize(
    ("arithmetic", "expected", "told"),
    [
        ("portable", ["nvidia:0", "nvidia:1", "cpu"], []),
        ("A, 1e-06 from the compiled kernels", ["cuda:0", "nvidia:1", "cpu"], ["as cuda:0"]),
        (None, ["cuda:0", "cpu"], ["as cuda:0", "without it"]),
    ],
)
def test_of_nvidias_gpus_auto_takes_the_kernel_text_where_it_has_the_cpus_bits(
    arithmetic: str | None, expected: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch sees nothing of the second one; without a compiler of texts there is torch, or none."""

    def find(name: DeviceName) -> Device:
        if arithmetic is None:
            raise ConfigurationError(f"--device {name}: libnvrtc is not installed")
        description = f"{name} (A)"
        return Device(
            kind="nvidia",
            index=name.index,
            description=description,
            dtypes=(),
            arithmetic=arithmetic,
        )

    monkeypatch.setattr(gpu, "count_gpus", lambda maker: 2)
    monkeypatch.setitem(profile._FINDERS, "nvidia", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A")
    monkeypatch.setattr(profile, "_good_dtypes", lambda torch_name: ())
    monkeypatch.setattr(profile, "_check_computes", lambda *of_gpu: None)
    lines: list[str] = []
    found = find_devices("auto", lines.append)
    assert [device.name for device in found] == expected
    assert len(lines) == len(told)
    assert all(words in line for words, line in zip(told, lines, strict=True))
    assert all(type(device.torch) is str for device in found)


def test_apples_gpu_gets_what_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = type("", (), {"available": 12 * GIB, "total": 16 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 2 * GIB)
    mps = Device(kind="mps", description="", dtypes=())
    assert MemoryBudget(device=mps, asked_bytes=None).free_bytes(mps) == 8 * GIB


@pytest.mark.parametrize(("card", "expected"), [(8, 8), (24, 16)])
def test_a_card_of_the_kernel_text_gets_all_of_its_memory_that_the_system_has_too(
    card: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights there are in the system's memory as well, which the CPU beside it shares."""
    memory: Any = type("", (), {"available": 32 * GIB, "total": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    driver = SimpleNamespace(free_bytes=card * GIB)
    monkeypatch.setattr(bits, "open_device", lambda name: SimpleNamespace(driver=driver))
    text, cpu = (Device(kind=kind, description="", dtypes=()) for kind in ("nvidia", "cpu"))
    budget = MemoryBudget(device=text, asked_bytes=None, others=(cpu,))
    assert budget.free_bytes(text) == expected * GIB
    assert budget.free_bytes(cpu) == 16 * GIB
    limits = budget.device_bytes([0, 0], n_nodes_here=1)
    assert limits == [int(n * GIB * MEMORY_SHARE) for n in (expected, 16)]


def test_memory_is_divided_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of cores share the system's memory, each GPU has its own."""

    def device(kind: str, index: int) -> Device:
        return Device(kind=kind, description="", dtypes=(), index=index)

    memory: Any = type("", (), {"available": 12 * GIB, "total": 16 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(profile, "container_free_bytes", lambda: None)
    monkeypatch.setattr(profile, "container_limit_bytes", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: ((8 + 16 * at.index) * GIB, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    first, *others = device("cuda", 0), device("cpu", 0), device("cuda", 1), device("cpu", 1)
    budget = MemoryBudget(device=first, others=tuple(others), asked_bytes=None)
    shares = budget.device_bytes([2 * GIB, 3 * GIB, 0, 1 * GIB], n_nodes_here=1)
    assert shares == [int(n * GIB * MEMORY_SHARE) for n in (10, 8, 24, 8)]
    assert budget.available_bytes() == (8 + 12 + 24) * GIB
    asked = MemoryBudget(device=first, others=tuple(others), asked_bytes=22 * GIB)
    assert asked.device_bytes([0] * 4, n_nodes_here=3) == [4 * GIB, 3 * GIB, 12 * GIB, 3 * GIB]
    monkeypatch.setattr(profile, "container_limit_bytes", lambda: 4 * GIB)
    assert asked.total_bytes(used_bytes=0, n_nodes_here=1) == 20 * GIB
