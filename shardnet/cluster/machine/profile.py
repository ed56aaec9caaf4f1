"""Profile this machine: its ids, cores, device, dtypes and memory.

Knows how to query the system. Must not know models or other nodes' profiles.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.container import (
    container_cores,
    container_free_bytes,
    container_limit_bytes,
)
from shardnet.cluster.machine.local_nodes import this_network
from shardnet.errors import ConfigurationError
from shardnet.runtime.stage.plugin import ComputePlugin, installed_compute, installed_computes
from shardnet.types import PORTABLE_ARITHMETIC, Arith, DType, NodeId

MEMORY_SHARE = 0.85
"""Share of the available memory that a node without --memory uses."""


def make_node_id() -> NodeId:
    """Generate a random node id, unique even if a home folder was copied."""
    return NodeId(uuid.uuid4().hex)


def make_host_id() -> str:
    """Return the id that all nodes of this machine share until it is started again.

    Containers of two machines may have one host name and one hardware address; it tells them apart.
    """
    return f"{machine_name()}-{hashlib.sha256(this_network().encode()).hexdigest()[:8]}"


def machine_name() -> str:
    """Return what this machine is called for good: host name and hardware address."""
    return f"{socket.gethostname()}-{uuid.getnode():012x}"


def available_cores() -> int:
    """Return how many cores this process may use: its container's share, at least one."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = container_cores()
    return max(1, min(n_cores or 1, int(quota) if quota is not None else sys.maxsize))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A compute device: `kind` is cpu, cuda or a plug-in's name, `dtypes` those it computes
    natively, best first.

    `isa` is the instruction set of the compiled kernels, or a word of kernels.py; "" where there
    are none to have: on a GPU, and on Windows. `torch` names the version and the CPU that it sees.
    `arithmetic` is NodeInfo's. `plugin` computes in place of torch.
    """

    kind: str
    description: str
    dtypes: tuple[DType, ...]
    isa: str = ""
    torch: str = ""
    arithmetic: str = ""
    plugin: ComputePlugin | None = None

    @classmethod
    def of_plugin(cls, plugin: ComputePlugin) -> Device:
        """Make the device of a plug-in."""
        return cls(
            kind=plugin.name,
            description=plugin.description,
            dtypes=plugin.dtypes,
            arithmetic=plugin.description,
            plugin=plugin,
        )

    def arith(self, asked: Arith) -> Arith:
        """Return what of `asked` makes a difference here: FAST where both are the same."""
        is_plain = self.kind != "cpu" or self.arithmetic == PORTABLE_ARITHMETIC
        return Arith.FAST if is_plain else asked

    @property
    def for_torch(self) -> str:
        """Where torch computes what a plug-in does not: draft models."""
        return self.kind if self.plugin is None else "cpu"


def find_device(requested: str) -> Device:
    """Find the device that --device names; `auto` takes a GPU if there is one.

    Raises ConfigurationError if the device does not exist here, is of an unknown kind, or is a
    plug-in's that cannot be used.
    """
    import torch

    from shardnet.model.kernels.linear import cpu_arithmetic

    if requested not in ("auto", "cpu", "cuda"):
        plugins = installed_computes()
        if requested in plugins:
            return Device.of_plugin(installed_compute(requested))
        *others, last = ("auto", "cpu", "cuda", *plugins)
        raise ConfigurationError(
            f"--device {requested} is unknown", remedy=f"choose {', '.join(others)} or {last}"
        )
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ConfigurationError(
            "--device cuda: torch finds no CUDA device here", remedy="use --device cpu"
        )
    if has_cuda and requested != "cpu":
        name = torch.cuda.get_device_name(0)
        return Device(
            kind="cuda",
            description=f"cuda ({name})",
            dtypes=_good_dtypes("cuda"),
            torch=torch.__version__,
            arithmetic=f"{name}, torch {torch.__version__}",
        )
    return Device(
        kind="cpu",
        description="cpu",
        dtypes=_good_dtypes("cpu"),
        isa=find_isa(os.environ),
        torch=f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        arithmetic=cpu_arithmetic(),
    )


def find_isa(environment: Mapping[str, str]) -> str:
    """Return the instruction set of the compiled kernels on this CPU, as Device has it."""
    from shardnet.model.kernels.library import ISA_VARIABLE, find_kernels

    found = find_kernels(environment)
    if found is not None:
        return found.isa.name.lower()
    if environment.get(ISA_VARIABLE, "").lower() == kernels.OFF:
        return kernels.OFF
    return "" if sys.platform == "win32" else kernels.NONE


def _good_dtypes(kind: str) -> tuple[DType, ...]:
    """Return the dtypes that the device computes in without falling back to another.

    Probes on one thread: the matmuls are so small that several threads on busy cores would wait
    for each other.
    """
    import torch

    from shardnet.model.kernels.linear import probe

    wanted = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(d for d in wanted if probe(torch.device(kind), d, d).dtype is d)
    finally:
        torch.set_num_threads(n_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory that a node may use for its stage. `asked_bytes` is --memory, None without it."""

    device: Device
    asked_bytes: int | None

    def total_bytes(self, *, used_bytes: int, n_nodes_here: int) -> int:
        """Return the memory limit of the stage: --memory, or a share of the available memory.

        On a CPU --memory counts as far as the container may use it: the system would end the node.

        `used_bytes` is the memory of the loaded stage, which counts as available; `n_nodes_here`
        the number of nodes that share this machine.
        """
        if self.asked_bytes is not None:
            most = container_limit_bytes() if self._is_host_memory else None
            return self.asked_bytes if most is None else min(self.asked_bytes, most)
        available = self.available_bytes() + used_bytes
        return int(available * MEMORY_SHARE / max(1, n_nodes_here))

    @property
    def _is_host_memory(self) -> bool:
        plugin = self.device.plugin
        return self.device.kind == "cpu" if plugin is None else plugin.free_bytes is None

    def available_bytes(self) -> int:
        """Return the free memory of the device now; on a CPU within the container's limit."""
        if self.device.plugin is not None and self.device.plugin.free_bytes is not None:
            return self.device.plugin.free_bytes()
        if self.device.kind == "cuda":
            import torch

            kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return int(torch.cuda.mem_get_info()[0]) + kept  # torch keeps what was freed
        return self.system_bytes()[0]

    def system_bytes(self) -> tuple[int, int]:
        """Return how much of the system's memory is available, and all of it, within a container's
        limit.
        """
        memory = psutil.virtual_memory()
        available, total = int(memory.available), int(memory.total)
        free, limit = container_free_bytes(), container_limit_bytes()
        return (
            available if free is None else min(available, free),
            total if limit is None else min(total, limit),
        )
