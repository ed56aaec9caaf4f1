"""What this node is and does now, as it reports it to others.

Knows where each fact is found. Must not send anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shardnet import __version__
from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.machine.profile import Device, available_cores, make_host_id
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.types import PORTABLE_ARITHMETIC
from shardnet.wire.framing.schema import MAX_NAME
from shardnet.wire.messages.membership import DeviceInfo, NodeInfo, StageInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """Describes this node at any time."""

    settings: NodeSettings
    advertisement: Advertisement
    host: StageHost
    orders: StageOrders
    started_s: float = field(default_factory=time.monotonic)

    def info(self) -> NodeInfo:
        """Describe this node: who it is, its memory in bytes, and the stage it has loaded."""
        loaded, membership = self.host.loaded, self.host.membership
        first, *others = devices = self.settings.budget.devices
        total_bytes = self.orders.memory_bytes()
        used_bytes = loaded.weight_bytes if loaded else 0
        stage = None
        if loaded is not None:
            layers = loaded.order.layers
            stage = StageInfo(
                model=loaded.order.model,
                layers=(layers.start, layers.end),
                rank=None if membership is None or membership.is_over else membership.rank,
            )
        return NodeInfo(
            node=self.settings.node,
            name=self.settings.name,
            address=self.advertisement.address,
            version=__version__,
            device=" + ".join(device.description for device in devices)[:MAX_NAME],
            memory_bytes=total_bytes,
            memory_free_bytes=max(0, total_bytes - used_bytes),
            cores=available_cores(),
            threads=self.orders.threads,
            dtypes=[dtype.value for dtype in first.dtypes],
            host_id=make_host_id(),
            stage=stage,
            isa=first.isa,
            arithmetic=" + ".join(dict.fromkeys(map(self._arithmetic_of, devices)))[:MAX_NAME],
            uptime_s=time.monotonic() - self.started_s,
            is_draining=self.host.refusals.is_draining,
            rests=self.host.refusals.rests,
            devices=self._devices() if others else [],
            tensor_parallel=self.settings.tensor_parallel,
        )

    def _devices(self) -> list[DeviceInfo]:
        room = self.orders.device_bytes()
        return [
            DeviceInfo(
                name=device.name,
                device=device.description,
                memory_bytes=n_bytes,
                threads=self.orders.threads_of(place),
                dtypes=[dtype.value for dtype in device.dtypes],
                isa=device.isa,
                arithmetic=self._arithmetic_of(device),
            )
            for place, (device, n_bytes) in enumerate(
                zip(self.settings.budget.devices, room, strict=True)
            )
        ]

    def _arithmetic_of(self, device: Device) -> str:
        """Name a device's arithmetic: behind a device of the kernel text the CPU's is its own."""
        first = self.settings.budget.device
        is_behind = device.kind == CPU and first.arithmetic == PORTABLE_ARITHMETIC
        return PORTABLE_ARITHMETIC if is_behind and first.driver else device.arithmetic

    def memory_free_bytes(self) -> int:
        """Return the bytes that a stage may take and that are not loaded."""
        return self.info().memory_free_bytes

    def threads(self) -> int:
        """Return the threads that a stage computes with."""
        return self.orders.threads
