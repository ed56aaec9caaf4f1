"""Machines that are not there, as plans see them: read from a text, with figures estimated.

machines.csv has devices that people own, as their data sheets say. Which share of that steps reach
is measured where CPUs are there, else that of docs/benchmarks.md. Must not ask any node.
"""

from __future__ import annotations

import csv
import difflib
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.machine.profile import MEMORY_SHARE
from shardnet.cluster.measuring.measurement import Measured, stage_speed
from shardnet.cluster.placement.estimate import speed_by_bytes
from shardnet.cluster.placement.figures import (
    LEAST_S,
    PREFILL_ROWS,
    CandidateNode,
    LinkSpeed,
    ModelShape,
)
from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.stage.estimate.memory_estimate import WeightForm, layer_read_bytes
from shardnet.types import PORTABLE_ARITHMETIC, DType, NodeId
from shardnet.wire.framing.schema import MAX_DEVICES
from shardnet.wire.messages.measurements import DeviceMeasured, NodeMeasured, StageSeconds
from shardnet.wire.messages.membership import DeviceInfo, NodeInfo
from shardnet.wire.messages.plans import NOT_THERE

GPU: Final = "gpu"
ESTIMATED: Final = "estimated"
"""The kernel of figures that nobody has measured."""


class Kind(NamedTuple):
    """What steps make of a data sheet (docs/benchmarks.md, Machines that are not there).

    Plain reads reach `reads` of the bandwidth, a step `step` of that; each layer takes `layer_s`
    and each token `token_s` besides. 256 rows multiply at `multiplies` of the TFLOP/s.
    """

    reads: float
    step: float
    layer_s: float
    token_s: float
    multiplies: float


KINDS: Final = {CPU: Kind(0.8, 0.8, 0.0, 0.0, 0.5), GPU: Kind(0.9, 0.6, 35e-6, 0.9e-3, 0.75)}
GIGABIT: Final = LinkSpeed(round_trip_s=0.4e-3, bytes_per_s=117e6)
"""The link to a machine that is not there, where no link between machines was measured."""

_NUMBER: Final = r"(\d{1,6}(?:\.\d{1,17})?)"
_EXACT: Final = re.compile(rf"\s*([^:]+):{_NUMBER}:{_NUMBER}(?::{_NUMBER})?\s*")
_PART: Final = re.compile(rf"(?:([1-8]) ?x )?(.*?)(?:\b{_NUMBER} ?gi?b?\b(.*))?", re.I | re.S)
_MAKERS: Final = re.compile(r"nvidia|geforce|amd|radeon|apple|[^a-z0-9]")


class Device(NamedTuple):
    """A device with `gib` of memory for a stage, 0 where it has its machine's, of which plain reads
    reach `gb_s`.
    """

    name: str
    kind: str
    gib: float
    gb_s: float
    tflops: float


class Machine(NamedTuple):
    """A machine that is not there."""

    name: str
    devices: Sequence[Device]

    def info(self, number: int, there: Sequence[NodeInfo]) -> NodeInfo:
        """Describe its node: a GPU computes by the kernel text, a CPU as the first one there."""
        cpu = next((node for node in there if node.device == CPU), None)
        by_text: dict[str, Any] = {"dtypes": [DType.FLOAT32.value], "isa": kernels.TEXT}
        by_text |= {"arithmetic": PORTABLE_ARITHMETIC}
        forms = {GPU: by_text, CPU: {key: getattr(cpu, key) for key in by_text} if cpu else by_text}
        devices = [
            DeviceInfo(
                name=CPU if one.kind == CPU else f"{GPU}:{place}",
                device=one.kind,
                memory_bytes=int(one.gib * 2**30),
                threads=1,
                **forms[one.kind],
            )
            for place, one in enumerate(self.devices)
        ]
        own = {"name": self.name, "memory_bytes": sum(one.memory_bytes for one in devices)}
        own |= dict.fromkeys(("node", "host_id"), f"added-{number}") | {"address": NOT_THERE}
        several = devices if len(devices) > 1 else []
        like = structs.replace(there[0], devices=several, tensor_parallel=0, stage=None)
        return structs.replace(like, **structs.asdict(devices[0]) | own)


@cache
def _table() -> dict[str, list[Device]]:
    """Read the table: by the plain form of a name its rows, of which the first is the usual one."""
    found: dict[str, list[Device]] = {}
    text = Path(__file__).with_name("machines.csv").read_text("utf-8")
    for name, kind, gib, gb_s, tflops in [*csv.reader(text.splitlines())][1:]:
        rate = float(gb_s) * KINDS[kind].reads
        one = Device(name, kind, float(gib or 0), rate, float(tflops))
        found.setdefault(_plain(name), []).append(one)
    return found


def _plain(name: str) -> str:
    return _MAKERS.sub("", name.casefold())


def parse_machine(text: str) -> Machine:
    """Read a machine: `NAME:GB/s:GiB[:TFLOPS]`, or devices and memory as people write them.

    Of the exact form the GB/s are those of plain reads, and all of the memory counts; with TFLOPS
    it is a GPU. Raises UsageError, which names the nearest devices that are known.
    """
    if exact := _EXACT.fullmatch(text):
        name, gb_s, gib, tflops = exact.groups()
        kind = GPU if tflops else CPU
        device = Device(name, kind, float(gib), float(gb_s), float(tflops or 1))
        if 0 in device:
            raise UsageError(f"'{text}': a machine has more than 0 of each")
        return Machine(name, [device])
    devices: list[Device] = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        assert found is not None, "it matches any text"
        count, before, size, after = found.groups("")
        if devices and not devices[-1].gib and not before + after:
            row = devices.pop()
        else:
            rows = _rows((before + after).strip() or "DDR4")
            row = next((row for row in rows if row.gib == float(size or 0)), rows[0])
        gib = float(size) if size else row.gib
        devices += int(count or 1) * [row._replace(gib=gib)]
    if not all(one.gib for one in devices) or len(devices) > MAX_DEVICES:
        raise UsageError(
            f"'{text}': up to {MAX_DEVICES} devices, of which each has memory",
            remedy="write 'RTX 3060 12GB, 32 GB', 'M4 Max 64GB' or NAME:GB/s:GiB",
        )
    used = [one._replace(gib=one.gib * MEMORY_SHARE) for one in devices]
    return Machine(text.strip(), sorted(used, key=lambda one: one.kind == CPU))


def _rows(name: str) -> Sequence[Device]:
    """Return the rows of that name. Raises UsageError, which names the nearest ones."""
    if rows := _table().get(_plain(name)):
        return rows
    near = difflib.get_close_matches(_plain(name), _table(), n=3, cutoff=0.4)
    named = f"; near it are {', '.join(_table()[one][0].name for one in near)}" if near else ""
    remedy = "give its figures, NAME:GB/s:GiB or NAME:GB/s:GiB:TFLOPS"
    raise UsageError(f"no device '{name}' is known{named}", remedy=remedy)


def with_estimates(
    measured: Measured,
    there: Sequence[NodeInfo],
    machines: Sequence[Machine],
    infos: Sequence[NodeInfo],
    config: ModelConfig,
    sizes: tuple[ModelShape, Sequence[CandidateNode]],
) -> Measured:
    """Add to figures of nodes that are `there` those of `machines`, whose nodes are `infos`.

    `sizes` are those of the model of `config`, and as each of all of them would hold it.
    """
    shape, found = sizes
    shapes = {
        one.node: [each.held.shape for each in one.devices.each]
        if one.devices
        else [one.held(shape).shape]
        for one in found
    }
    step = _step(measured, shapes)
    n_weights = layer_read_bytes(config, WeightForm(dtype=DType.FLOAT32)) / 4
    speeds, reports = {**measured.speeds}, [*measured.reports]
    for machine, info in zip(machines, infos, strict=True):
        node = NodeId(info.node)
        seconds = [
            _seconds(device, read, n_weights, step if device.kind == CPU else None)
            for device, read in zip(machine.devices, shapes[node], strict=True)
        ]
        told = [
            DeviceMeasured(name=one.name, memory_bytes=one.memory_bytes, seconds=each)
            for one, each in zip(info.devices, seconds, strict=False)
        ]
        own = {key: getattr(info, key) for key in ("node", "name", "memory_bytes", "isa")}
        speeds[node] = stage_speed(seconds[0], is_steady=True)
        reports.append(NodeMeasured(**own, seconds=seconds[0], kernel=ESTIMATED, devices=told))
    added = [NodeId(info.node) for info in infos]
    ways = [*product(added, [NodeId(info.node) for info in there]), *combinations(added, 2)]
    links = dict.fromkeys(ways, _usual_link(measured, there))
    return Measured(speeds=speeds, links={**measured.links, **links}, reports=tuple(reports))


def _seconds(
    device: Device, shape: ModelShape, n_weights: float, step: float | None
) -> StageSeconds:
    """Estimate the times of a device whose steps reach the share `step` of plain reads."""
    kind = KINDS[device.kind]
    read = speed_by_bytes(shape, device.gb_s * 1e9 * (step or kind.step))
    multiplied_s = 2 * n_weights * PREFILL_ROWS / (device.tflops * 1e12 * kind.multiplies)
    return StageSeconds(
        layer_s=read.layer_s + kind.layer_s,
        layer_256_s=max(read.layer_s, multiplied_s) + kind.layer_s,
        embed_s=0.0,
        head_s=read.head_s + kind.layer_s,
        step_s=kind.token_s,
    )


def _step(measured: Measured, shapes: Mapping[NodeId, Sequence[ModelShape]]) -> float | None:
    """Return the share of plain reads that steps reach here, None where no node measured both."""
    shares = []
    for told in measured.reports:
        figures = [one.seconds for one in told.devices] or [told.seconds]
        for seconds, shape in zip(figures, shapes[NodeId(told.node)], strict=False):
            if seconds is not None and seconds.read_bytes_per_s:
                read = speed_by_bytes(shape, seconds.read_bytes_per_s)
                shares.append(read.layer_s / max(LEAST_S, seconds.layer_s))
    return statistics.median(shares) if shares else None


def _usual_link(measured: Measured, there: Sequence[NodeInfo]) -> LinkSpeed:
    """Return what links between machines usually are here."""
    hosts = {info.node: info.host_id for info in there}
    apart = [link for (a, b), link in measured.links.items() if hosts[a] != hosts[b]]
    if not apart:
        return GIGABIT
    return LinkSpeed(
        round_trip_s=statistics.median(link.round_trip_s for link in apart),
        bytes_per_s=statistics.median(link.bytes_per_s for link in apart),
    )
