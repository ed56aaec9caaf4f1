"""The devices of nodes as the planner takes them: from what nodes report, with what was measured.

Must not know how layers are divided over them (placement/devices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.measuring.measurement import Measured, stage_speed
from shardnet.cluster.placement.figures import (
    HeldModel,
    LinkSpeed,
    NodeDevice,
    NodeDevices,
    StageSpeed,
)
from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import cut_of
from shardnet.wire.messages.measurements import DeviceMeasured, NodeMeasured
from shardnet.wire.messages.membership import NodeInfo

JOINED_BYTES_PER_S = 5e9
"""How fast parts of many rows are joined: one copy by one core."""


def device_infos(info: NodeInfo) -> list[NodeInfo]:
    """Describe each of a node's devices as a node of its own."""
    return [
        structs.replace(
            info,
            device=device.device,
            memory_bytes=device.memory_bytes,
            threads=device.threads,
            dtypes=device.dtypes,
            isa=device.isa,
            arithmetic=device.arithmetic,
            devices=[],
        )
        for device in info.devices
    ]


def node_devices(
    info: NodeInfo,
    config: ModelConfig,
    measured: Measured,
    held: Callable[[NodeInfo], HeldModel],
) -> NodeDevices | None:
    """Describe the devices of a node, None for a node of one.

    `held` says how a device, described as a node, would hold the model of `config`.
    """
    if not info.devices:
        return None
    report = next((told for told in measured.reports if told.node == info.node), None)
    speeds = _speeds(info, report)
    kinds = [device.name.partition(":")[0] for device in info.devices]
    each = tuple(
        NodeDevice(name=device.name, kind=kind, held=held(own), speed=speed)
        for device, kind, own, speed in zip(
            info.devices, kinds, device_infos(info), speeds, strict=True
        )
    )
    n_devices = len(each)
    sizes = [n for n in range(2, n_devices + 1) if n_devices % n == 0]
    gather_s = report.gather_s if report is not None else None
    return NodeDevices(
        each=each,
        tensor_parallel=info.tensor_parallel if n_devices % (info.tensor_parallel or 1) == 0 else 0,
        gather=None
        if gather_s is None
        else LinkSpeed(round_trip_s=gather_s, bytes_per_s=JOINED_BYTES_PER_S),
        why_not_shared=_why_not_shared(each, gather_s, config),
        whole_heads=frozenset(n for n in sizes if not cut_of(config, 0, n).cuts_heads),
        attention_share=_attention_share(config),
    )


def _speeds(info: NodeInfo, report: NodeMeasured | None) -> Sequence[StageSpeed | None]:
    told: dict[str, DeviceMeasured] = {}
    if report is not None:
        told = {device.name: device for device in report.devices}
    return [_speed(told.get(device.name)) for device in info.devices]


def _speed(told: DeviceMeasured | None) -> StageSpeed | None:
    if told is None or told.seconds is None:
        return None
    try:
        return stage_speed(told.seconds, is_steady=told.is_steady)
    except UsageError:  # another node reports it: it counts as not measured
        return None


def _why_not_shared(each: Sequence[NodeDevice], gather_s: float | None, config: ModelConfig) -> str:
    others = [device.name for device in each if device.kind != each[0].kind]
    if others:
        return f"{each[0].name} and {others[0]} are unlike"
    if each[0].kind != CPU:
        return "only groups of cores can share layers"
    if config.has_mtp:
        return "the one that predicts further tokens (MTP) cannot be"
    return "joining their parts is not measured" if gather_s is None else ""


def _attention_share(config: ModelConfig) -> float:
    """Return about how much of a layer's weights its attention has."""
    heads = config.n_heads * config.head_size
    attention = config.hidden_size * (2 * heads + 2 * config.n_kv_heads * config.head_size)
    inner = config.intermediate_size
    if config.experts is not None:
        inner = config.experts.top_k * config.experts.intermediate_size
    return attention / max(1, attention + 3 * config.hidden_size * inner)
