"""Profile this machine: its ids, cores, device, dtypes and memory.

Knows how to query the system. Must not know models or other nodes' profiles.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import psutil

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.cores import (
    container_cores,
    container_free_bytes,
    container_limit_bytes,
    group_cores,
    read_cores,
)
from shardnet.cluster.machine.device_list import (
    AUTO,
    BY_TEXT,
    CPU,
    CUDA,
    MPS,
    NVIDIA,
    DeviceName,
    parse_devices,
)
from shardnet.cluster.machine.folders import KERNELS_FOLDER, cache_dir
from shardnet.cluster.machine.local_nodes import this_network
from shardnet.errors import ConfigurationError, UsageError
from shardnet.files import made_once
from shardnet.runtime.stage.compute import ComputePlugin, installed_compute, installed_computes
from shardnet.types import PORTABLE_ARITHMETIC, Arith, DType, NodeId
from shardnet.wire.framing.schema import MAX_DEVICES

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
    """A compute device: `kind` is one of device_list.py or a plug-in's name, `dtypes` those it
    computes natively, best first.

    `name` is how `--device` names it, and `index` which of its kind it is: of torch's GPUs, or of
    the groups of cores that the CPU is divided into, None for all of it. Its threads run on
    `cores`, on any where there are none. `isa` is the instruction set of the compiled kernels, or a
    word of kernels.py; "" on a GPU. `torch` names the version and the CPU that it sees.
    `arithmetic` is NodeInfo's. `plugin` computes in place of torch.
    """

    kind: str
    description: str
    dtypes: tuple[DType, ...]
    index: int | None = None
    cores: tuple[int, ...] = ()
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
        """Return what of `asked` makes a difference here: FAST where both are the same.

        The kernel text has the bits of portable arithmetic alone.
        """
        if self.kind in BY_TEXT:
            return Arith.PORTABLE
        is_plain = asked is Arith.PORTABLE and self.arithmetic == PORTABLE_ARITHMETIC
        return Arith.FAST if self.kind != CPU or is_plain else asked

    @property
    def name(self) -> str:
        """What `--device` calls it."""
        return str(DeviceName(self.kind, self.index))

    @property
    def driver(self) -> str:
        """By what name the kernel text computes on it, "" where that does not."""
        return self.name if self.kind in BY_TEXT else ""

    @property
    def for_torch(self) -> str:
        """What torch calls it: also where it computes what a plug-in does not, draft models."""
        if self.kind == CUDA:
            return self.name
        return self.kind if self.plugin is None and self.kind not in BY_TEXT else CPU


def find_devices(
    requested: str, log: Callable[[str], None] = lambda line: None
) -> tuple[Device, ...]:
    """Find the devices that --device names, in its order.

    `auto` takes the GPUs that compute here and the CPU behind them: plans take what is measured to
    be faster of these, or both. Why a GPU is left out, `log` is told in a line. Raises
    ConfigurationError for a list that makes no sense, for a device that does not exist here, does
    not compute, is of an unknown kind, or is a plug-in's that cannot be used.
    """
    plugins = installed_computes()
    try:
        names = parse_devices(requested, plugins)
    except UsageError as error:
        raise ConfigurationError(f"--device {error.message}", remedy=error.remedy) from error
    if names[0].kind in plugins:
        return (Device.of_plugin(installed_compute(names[0].kind)),)
    if names[0].kind == AUTO:
        return (*_usable_gpus(log), _find_cpu())
    found = {name: _FINDERS[name.kind](name) for name in names if name.kind != CPU}
    groups = [name for name in names if name.kind == CPU]
    if groups:
        cpu = _find_cpu()
        cores = group_cores(read_cores(), len(groups)) if len(groups) > 1 else ((),)
        for name in groups:
            own = cores[name.index or 0]
            found[name] = replace(cpu, description=str(name), index=name.index, cores=own)
    return tuple(found[name] for name in names)


def _usable_gpus(log: Callable[[str], None]) -> Iterator[Device]:
    """Find all GPUs that compute; tell `log` why another one is left out.

    One of NVIDIA's computes by the kernel text where that has the library's bits, else by torch.
    """
    import torch

    from shardnet.model.drivers.gpu import CUDA as NVIDIAS
    from shardnet.model.drivers.gpu import count_gpus

    by_torch = torch.cuda.device_count() if torch.cuda.is_available() else 0
    by_text = count_gpus(NVIDIAS)
    for index in range(min(max(by_torch, by_text), MAX_DEVICES - 1)):
        names = [DeviceName(NVIDIA, index)] if index < by_text else []
        names += [DeviceName(CUDA, index)] if index < by_torch else []
        yield from _first_usable(names, log)
    if torch.backends.mps.is_available():
        yield from _first_usable([DeviceName(MPS)], log)


def _first_usable(names: Sequence[DeviceName], log: Callable[[str], None]) -> Iterator[Device]:
    """Find the first of a GPU's names by which it computes as it should, if there is one."""
    for name, other in zip_longest(names, names[1:]):
        try:
            found = _FINDERS[name.kind](name)
        except ConfigurationError as error:
            instead = f"as {other}" if other else "without it"
            log(f"{error.message}; this node computes {instead}")
            continue
        if name.kind != NVIDIA or found.arithmetic == PORTABLE_ARITHMETIC or other is None:
            yield found
            return
        log(f"{found.arithmetic}; this node computes as {other}")


def _find_cuda(name: DeviceName) -> Device:
    import torch

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (name.index or 0) >= n_gpus:
        few = "no CUDA device" if not n_gpus else f"{n_gpus}, numbered from cuda:0,"
        raise ConfigurationError(
            f"--device {name}: torch finds {few} here",
            remedy="use --device cpu" if not n_gpus else "name one of those",
        )
    found = Device(kind=CUDA, index=name.index, description="", dtypes=())
    model = torch.cuda.get_device_name(name.index or 0)
    _check_computes(name, model, found.for_torch)
    return replace(
        found,
        description=f"{name} ({model})",
        dtypes=_good_dtypes(found.for_torch),
        torch=str(torch.__version__),
        arithmetic=f"{model}, torch {torch.__version__}",
    )


def _find_mps(name: DeviceName) -> Device:
    """Find Apple's GPU."""
    import torch

    if not torch.backends.mps.is_available():
        raise ConfigurationError(
            f"--device {name}: torch finds no GPU of Apple's here", remedy="use --device cpu"
        )
    chip = platform.processor() or platform.machine()
    _check_computes(name, chip, MPS)
    return Device(
        kind=MPS,
        description=f"{name} ({chip})",
        dtypes=_good_dtypes(MPS),
        torch=str(torch.__version__),
        arithmetic=f"{name} of {chip}, torch {torch.__version__}",
    )


def _find_by_text(name: DeviceName) -> Device:
    """Find a device of the kernel text, and see whether it gives the library's bits."""
    from shardnet.model.devices.bits import error_of, open_device
    from shardnet.model.kernels.library import native_kernels

    if native_kernels() is None:
        raise ConfigurationError(
            f"--device {name}: the compiled kernels are missing, with which it is compared",
            remedy=kernels.REMEDY,
        )
    device = open_device(str(name), partial(made_once, cache_dir(os.environ) / KERNELS_FOLDER))
    driver = device.driver
    try:
        error = error_of(device)
    except ConfigurationError as failed:
        raise ConfigurationError(
            f"--device {name}: {failed.message}", remedy="use --device cpu"
        ) from failed
    unlike = f"{driver.description}, {error:.1g} from the compiled kernels"
    return Device(
        kind=name.kind,
        index=name.index,
        description=driver.description,
        dtypes=(DType.FLOAT32,),
        isa=kernels.TEXT,
        arithmetic=unlike if error else PORTABLE_ARITHMETIC,
    )


_FINDERS = {CUDA: _find_cuda, MPS: _find_mps, **dict.fromkeys(BY_TEXT, _find_by_text)}


def _check_computes(name: DeviceName, model: str, torch_name: str) -> None:
    """Raise ConfigurationError for a GPU that torch sees but has no kernels for."""
    import torch

    from shardnet.model.kernels.devices import why_unusable

    why = why_unusable(torch.device(torch_name))
    if why:
        raise ConfigurationError(
            f"--device {name}: torch {torch.__version__} cannot compute on {model}: {why}",
            remedy="install a torch build with kernels for it, or use --device cpu",
        )


def _find_cpu() -> Device:
    import torch

    from shardnet.model.kernels.linear import cpu_arithmetic

    return Device(
        kind=CPU,
        description=CPU,
        dtypes=_good_dtypes(CPU),
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
    return kernels.NONE


def _good_dtypes(torch_name: str) -> tuple[DType, ...]:
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
        return tuple(d for d in wanted if probe(torch.device(torch_name), d, d).dtype is d)
    finally:
        torch.set_num_threads(n_threads)


@dataclass(slots=True, kw_only=True, eq=False)
class MemoryBudget:
    """The memory that a node may use for its stage. `asked_bytes` is --memory, None without it.

    `device` is the node's first one; its `others` have memory of their own, but groups of cores
    share the system's.
    """

    device: Device
    asked_bytes: int | None
    others: tuple[Device, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the node, in the order in which they were named."""
        return (self.device, *self.others)

    def total_bytes(self, *, used_bytes: int, n_nodes_here: int) -> int:
        """Return the memory limit of the stage on all devices: --memory, or a share of what is
        available.

        On a CPU --memory counts as far as the container may use it: the system would end the node.

        `used_bytes` is the memory of the loaded stage, which counts as available; `n_nodes_here`
        the number of nodes that share this machine.
        """
        used = [used_bytes, *[0] * len(self.others)]
        return sum(self.device_bytes(used, n_nodes_here=n_nodes_here))

    def device_bytes(self, used_bytes: Sequence[int], *, n_nodes_here: int) -> list[int]:
        """Return the memory limit of each device, where the loaded stage has `used_bytes` of each.

        --memory is divided as what is available is, and of several devices one with memory of its
        own gets no more than that. See total_bytes.
        """
        on_host = [_has_host_memory(device) for device in self.devices]
        if self.asked_bytes is None or self.others:
            available = self._available_bytes(on_host, used_bytes)
        else:
            available = [1]  # it need not have anything free to be promised all
        if self.asked_bytes is None:
            return [int(n_bytes * MEMORY_SHARE / max(1, n_nodes_here)) for n_bytes in available]
        in_all = sum(available) or 1
        asked = [self.asked_bytes * n_bytes // in_all for n_bytes in available]
        most = container_limit_bytes()
        part = sys.maxsize if most is None else most // max(1, sum(on_host))
        parts = [part if host else sys.maxsize for host in on_host]
        if self.others:  # what is more than a card has is not found elsewhere
            own = zip(self.devices, parts, available, strict=True)
            parts = [part if _is_host(device) else min(part, n) for device, part, n in own]
        return [min(n_bytes, part) for n_bytes, part in zip(asked, parts, strict=True)]

    def _available_bytes(self, on_host: Sequence[bool], used_bytes: Sequence[int]) -> list[int]:
        """Return what each device has free, with what the loaded stage has of it."""
        used_on_host = sum(used for used, host in zip(used_bytes, on_host, strict=True) if host)
        share = (self.system_bytes()[0] + used_on_host) // max(1, sum(on_host))
        return [
            self._within(share, device, used)
            for device, used in zip(self.devices, used_bytes, strict=True)
        ]

    def free_bytes(self, device: Device) -> int:
        """Return the free memory of one of the devices now; groups of cores share the system's."""
        n_sharing = sum(map(_has_host_memory, self.devices)) or 1
        share = self.system_bytes()[0] // n_sharing
        return self._within(share, device, 0)

    def _within(self, share: int, device: Device, used: int) -> int:
        """Return the free and the `used` bytes of a device, of the system's memory its `share`.

        A card that the kernel text computes on takes of both: weights stay in the system's, too.
        """
        if _is_host(device):
            return share
        own = self._free_bytes(device) + used
        return min(share, own) if _has_host_memory(device) else own

    def available_bytes(self) -> int:
        """Return the free memory of all devices now; on a CPU within the container's limit."""
        on_host = [device for device in self.devices if _has_host_memory(device)][:1]
        others = [device for device in self.devices if not _has_host_memory(device)]
        return sum(self._free_bytes(device) for device in (*on_host, *others))

    def _free_bytes(self, device: Device) -> int:
        if device.plugin is not None and device.plugin.free_bytes is not None:
            return device.plugin.free_bytes()
        if device.kind == CUDA:
            import torch

            own = torch.device(device.for_torch)
            kept = torch.cuda.memory_reserved(own) - torch.cuda.memory_allocated(own)
            return int(torch.cuda.mem_get_info(own)[0]) + kept  # torch keeps what was freed
        if device.kind == MPS:  # beyond that Metal moves buffers to and fro
            import torch

            left = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
            return max(0, min(self.system_bytes()[0], int(left)))
        if device.driver:  # what is there is in the system's memory too
            from shardnet.model.devices.bits import open_device

            return min(self.system_bytes()[0], open_device(device.driver).driver.free_bytes)
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


def _is_host(device: Device) -> bool:
    """Say whether a device has the system's memory and no other limit."""
    return _has_host_memory(device) and device.kind not in (MPS, *BY_TEXT)


def _has_host_memory(device: Device) -> bool:
    plugin = device.plugin
    return device.kind in (CPU, MPS, *BY_TEXT) if plugin is None else plugin.free_bytes is None
