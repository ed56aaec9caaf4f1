"""Describe nodes to the planner: how each would hold a model, how fast it is, what it lacks. Pure.

Must not know what a client asks for, nor how a plan is chosen (planning/placing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.placement.devices import as_one
from shardnet.cluster.placement.figures import (
    CandidateNode,
    HeldModel,
    Links,
    ModelShape,
    Objective,
)
from shardnet.cluster.planning.model_shape import QuantizationChoice, model_shape
from shardnet.cluster.planning.node_devices import node_devices
from shardnet.cluster.planning.ring_dtypes import NodeForm, node_ariths, node_form
from shardnet.cluster.sharing.replica_sources import ReplicaSource
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.memory_estimate import graph_bytes
from shardnet.stage.estimate.stored_dtype import is_streamable
from shardnet.types import Arith, DType, NodeId, WireDType
from shardnet.wire.messages.membership import NodeInfo

Holdings = Mapping[NodeId, ReplicaSource]
"""What nodes have of a model."""
NO_HOLDINGS: Holdings = MappingProxyType({})


def forms_of(
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    dtype: DType,
    requested: str,
    arith: Arith,
) -> dict[NodeId, NodeForm]:
    """Tell in which form each node holds the model in a ring of `dtype` and `arith`."""
    ariths, linear = node_ariths(requested, arith, nodes), facts.linear_dtype
    return {
        (node := NodeId(info.node)): node_form(info, dtype, ariths[node], facts.config, linear)
        for info in nodes
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The sizes of a model in each form in which nodes hold it, each computed once."""

    facts: ModelFacts
    context: int
    wire: WireDType
    gather: WireDType | None = None
    quantization: QuantizationChoice
    narrow_hops: Mapping[tuple[NodeId, NodeId], int]
    _known: dict[tuple[DType, DType, bool], ModelShape] = field(default_factory=dict)

    def of(self, form: NodeForm) -> ModelShape:
        """Return the sizes on a node that holds the model so."""
        key = (form.dtype, form.linear, form.unpacks)
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
) -> list[CandidateNode]:
    """Describe the nodes to the planner. A GPU keeps memory for CUDA graphs."""
    graphs_bytes = graph_bytes(facts.config, dtype)

    def held(node: NodeInfo) -> HeldModel:
        memory_bytes = max(0, node.memory_bytes - graphs_bytes * node.device.startswith("cuda"))
        form = forms[NodeId(node.node)]
        if node.dtypes != by_node[node.node].dtypes:  # a device that is not the node's first
            form = node_form(node, dtype, arith, facts.config, facts.linear_dtype)
        return HeldModel(shape=shapes.of(form), memory_bytes=memory_bytes)

    by_node = {node.node: node for node in nodes}
    found = []
    for node in nodes:
        devices = node_devices(node, facts.config, measured, held)
        one = CandidateNode(
            node=NodeId(node.node),
            name=node.name,
            memory_bytes=held(node).memory_bytes,
            speed=measured.speeds.get(NodeId(node.node)),
            disk_bytes_per_s=disks.get(node.node),
            shape=shapes.of(forms[NodeId(node.node)]),
            devices=devices,
        )
        if devices is not None:
            one = as_one(one, devices, None, facts.config.n_layers, objective)
        found.append(one)
    return found


def fetching(
    candidate: CandidateNode, facts: ModelFacts, holdings: Holdings, links: Links
) -> CandidateNode:
    """Add what a node lacks of the model, and the best measured rate from a node that has it."""
    own = holdings.get(candidate.node)
    lacking = () if own is None else own.lacking_bytes(facts.model_id, facts.layers.size_bytes)
    if not any(lacking):
        return candidate
    ways = [(source.node, candidate.node) for source in holders_of(facts, holdings)]
    measured = [links.get(way) or links.get(way[::-1]) for way in ways]
    rates = [link.bytes_per_s for link in measured if link is not None]
    return replace(candidate, lacking=lacking, fetch_bytes_per_s=max(rates, default=None))


def holders_of(facts: ModelFacts, holdings: Holdings) -> list[ReplicaSource]:
    """Return the nodes with the whole model, else those with parts of it."""
    having = [source for source in holdings.values() if source.model_id == facts.model_id]
    return [source for source in having if source.is_complete] or having
