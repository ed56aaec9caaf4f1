"""Describe nodes and their devices to the planner: how each would hold a model, how fast. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from msgspec import structs

from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.measuring.measurement import Measured, stage_speed
from shardnet.cluster.placement.devices import as_one
from shardnet.cluster.placement.figures import (
    CandidateNode,
    HeldModel,
    Links,
    LinkSpeed,
    ModelShape,
    NodeDevice,
    NodeDevices,
    Objective,
    StageSpeed,
)
from shardnet.cluster.planning.model_shape import QuantizationChoice, model_shape
from shardnet.cluster.planning.ring_dtypes import NodeForm, node_ariths, node_form
from shardnet.cluster.sharing.replica_sources import ReplicaSource
from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import cut_of
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.memory_estimate import KEPT_ROWS_BYTES, graph_bytes
from shardnet.stage.estimate.stored_dtype import is_streamable
from shardnet.types import Arith, DType, LayerRange, NodeId, WireDType
from shardnet.wire.messages.measurements import DeviceMeasured, NodeMeasured
from shardnet.wire.messages.membership import NodeInfo

JOINED_BYTES_PER_S = 5e9
"""How fast parts of many rows are joined: one copy by one core."""


def device_infos(info: NodeInfo) -> list[NodeInfo]:
    """Describe each of a node's devices as a node of its own."""
    return [
        structs.replace(info, **structs.asdict(device) | {"name": info.name, "devices": []})
        for device in info.devices
    ]


def node_devices(
    info: NodeInfo, config: ModelConfig, measured: Measured, held: Callable[[NodeInfo], HeldModel]
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
        tensor_parallel=tensor_parallel_of(info),
        gather=None
        if gather_s is None
        else LinkSpeed(round_trip_s=gather_s, bytes_per_s=JOINED_BYTES_PER_S),
        why_not_shared=_why_not_shared(each, gather_s, config),
        whole_heads=frozenset(n for n in sizes if not cut_of(config, 0, n).cuts_heads),
        attention_share=_attention_share(config),
    )


def tensor_parallel_of(info: NodeInfo) -> int:
    """Return how many of a node's devices were ordered to share each layer, 0 for as is best."""
    asked = info.tensor_parallel
    return asked if asked and len(info.devices) % asked == 0 else 0


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
        return "the layer that predicts further tokens cannot be cut over devices"
    return "joining their parts is not measured" if gather_s is None else ""


def _attention_share(config: ModelConfig) -> float:
    """Return about how much of a layer's weights its attention has."""
    heads = config.n_heads * config.head_size
    attention = config.hidden_size * (2 * heads + 2 * config.n_kv_heads * config.head_size)
    inner = config.intermediate_size
    if config.experts is not None:
        inner = config.experts.top_k * config.experts.intermediate_size
    return attention / max(1, attention + 3 * config.hidden_size * inner)


Holdings = Mapping[NodeId, ReplicaSource]
"""What nodes have of a model."""
NO_HOLDINGS: Holdings = MappingProxyType({})


def forms_of(
    facts: ModelFacts, nodes: Sequence[NodeInfo], dtype: DType, requested: str, arith: Arith
) -> dict[NodeId, NodeForm]:
    """Tell in which form each node holds the model in a ring of `dtype` and `arith`."""
    ariths = node_ariths(requested, arith, nodes)
    return {
        NodeId(info.node): form_on(facts, info, dtype, ariths[NodeId(info.node)]) for info in nodes
    }


def form_on(facts: ModelFacts, node: NodeInfo, dtype: DType, arith: Arith) -> NodeForm:
    """Tell in which form a node that computes by `arith` holds the model in a ring of `dtype`."""
    is_packed = facts.packed is not None and facts.packed.is_all
    return node_form(node, dtype, arith, facts.config, facts.linear_dtype, is_packed=is_packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The sizes of a model in each form in which nodes hold it, each computed once."""

    facts: ModelFacts
    context: int
    wire: WireDType
    gather: WireDType | None = None
    quantization: QuantizationChoice
    narrow_hops: Mapping[tuple[NodeId, NodeId], int]
    _known: dict[tuple[DType, DType, bool, DType | None], ModelShape] = field(default_factory=dict)

    def of(self, form: NodeForm) -> ModelShape:
        """Return the sizes on a node that holds the model so."""
        key = (form.dtype, form.linear, form.unpacks, form.held)
        if key not in self._known:
            self._known[key] = self._made(form)
        return self._known[key]

    def _made(self, form: NodeForm) -> ModelShape:
        facts = self.facts
        shape = model_shape(
            facts.config,
            form.dtype,
            self.context,
            self.wire,
            self.quantization if not form.unpacks else self.quantization.unpacked,
            form.linear,
            None if form.unpacks else facts.packed,
            self.gather,
            facts.tower_bytes.get(form.dtype, 0),
            form.held,
        )
        is_quantised = self.quantization.weights is not None
        streams = is_quantised or is_streamable(facts.stored_dtype, facts.packed, form.linear)
        streaming = shape.streaming if streams else None
        return replace(shape, streaming=streaming, narrow_hops=self.narrow_hops)


def candidates_of(
    facts: ModelFacts,
    dtype: DType,
    nodes: Sequence[NodeInfo],
    measured: Measured,
    disks: Mapping[str, float | None],
    shapes: Shapes,
    forms: Mapping[NodeId, NodeForm],
    arith: Arith = Arith.FAST,
    objective: Objective = Objective.LATENCY,
    holdings: Holdings = NO_HOLDINGS,
) -> list[CandidateNode]:
    """Describe the nodes to the planner, and what of the model those lack that have `holdings`.

    A GPU keeps memory for CUDA graphs, others for rows of tables if their disk has no room for all
    that they lack.
    """
    graphs_bytes = graph_bytes(facts.config, dtype)
    plain = [_fetching(node, facts, holdings, measured.links) for node in nodes]
    whole = LayerRange(0, facts.config.n_layers)
    asking = {one.node for one in plain if one.elsewhere_bytes(whole)}

    def beside_bytes(node: NodeInfo) -> tuple[int, int]:
        is_gpu = node.device.startswith("cuda")
        return graphs_bytes * is_gpu, KEPT_ROWS_BYTES * (node.node in asking and not is_gpu)

    def held(node: NodeInfo) -> HeldModel:
        memory_bytes = max(0, node.memory_bytes - sum(beside_bytes(node)))
        form = forms[NodeId(node.node)]
        if node.dtypes != by_node[node.node].dtypes:  # a device that is not the node's first
            form = form_on(facts, node, dtype, arith)
        return HeldModel(shape=shapes.of(form), memory_bytes=memory_bytes)

    by_node = {node.node: node for node in nodes}
    found = []
    for node, one in zip(nodes, plain, strict=True):
        devices = node_devices(node, facts.config, measured, held)
        one = replace(
            one,
            memory_bytes=held(node).memory_bytes,
            rows_bytes=beside_bytes(node)[1],
            speed=measured.speeds.get(NodeId(node.node)),
            disk_bytes_per_s=disks.get(node.node),
            shape=shapes.of(forms[NodeId(node.node)]),
            devices=devices,
        )
        if devices is not None:
            one = as_one(one, devices, None, facts.config.n_layers, objective)
        found.append(one)
    return found


def _fetching(info: NodeInfo, facts: ModelFacts, holdings: Holdings, links: Links) -> CandidateNode:
    """Say what a node lacks of the model, and the best measured rate from a node that has it."""
    candidate = CandidateNode(
        node=NodeId(info.node), name=info.name, memory_bytes=info.memory_bytes
    )
    own = holdings.get(candidate.node)
    layers = facts.layers
    sizes = layers.size_bytes, layers.looked_up
    lacking = () if own is None else own.lacking_bytes(facts.model_id, *sizes)
    if not any(lacking):
        return candidate
    ways = [(source.node, candidate.node) for source in holders_of(facts, holdings)]
    measured = [links.get(way) or links.get(way[::-1]) for way in ways]
    rates = [link.bytes_per_s for link in measured if link is not None]
    return replace(
        candidate,
        lacking=lacking,
        fetch_bytes_per_s=max(rates, default=None),
        table_bytes=layers.looked_up,
        room_bytes=own.room_bytes if own is not None else None,
    )


def holders_of(facts: ModelFacts, holdings: Holdings) -> list[ReplicaSource]:
    """Return the nodes with the whole model, else those with parts of it."""
    having = [source for source in holdings.values() if source.model_id == facts.model_id]
    return [source for source in having if source.is_complete] or having
