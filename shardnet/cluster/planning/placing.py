"""From candidates, model and figures to a plan: the step of planning that decides. Pure.

Knows how a choice becomes a call of the planner (cluster/placement). Must not gather anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, Measured
from shardnet.cluster.peers.sleepers import words
from shardnet.cluster.placement.devices import first_device, place_over_devices
from shardnet.cluster.placement.energy import joules_a_token, ring_without
from shardnet.cluster.placement.figures import (
    LEAST_BYTES_PER_S,
    CandidateNode,
    Exclusion,
    Links,
    ModelShape,
    Objective,
    Placement,
)
from shardnet.cluster.placement.placement import place, place_exactly, place_streaming
from shardnet.cluster.placement.room import fits_somehow
from shardnet.cluster.placement.spans import Division, divide, grouped, place_span, weigh_spans
from shardnet.cluster.placement.words import LISTED
from shardnet.cluster.planning.candidates import (
    NO_HOLDINGS,
    Holdings,
    Shapes,
    candidates_of,
    forms_of,
    holders_of,
    tensor_parallel_of,
)
from shardnet.cluster.planning.model_shape import QuantizationChoice
from shardnet.cluster.planning.plan import Plan, silent_words
from shardnet.cluster.planning.ring_dtypes import (
    NodeForm,
    narrow_hops,
    settle_arith,
    settle_dtype,
    settle_wires,
)
from shardnet.cluster.planning.turns import with_conversations
from shardnet.errors import PlanError, UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import adapters_not_cut, mtp_not_cut
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.stored_dtype import check_streamable
from shardnet.types import Arith, DType, LayerRange, NodeId, WireDType, parse_wires
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import LeftOut, ModelChoice, PlannedEnergy

MOST_WITHOUT: Final = 8
"""Nodes of a ring without which it is planned again, to predict its joules."""

NO_FLAGS: Final = ModelChoice(model="")


def make_plan(
    choice: ModelChoice,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    measured: Measured = NOTHING_MEASURED,
    silent: Sequence[LeftOut] = (),
    holdings: Holdings = NO_HOLDINGS,
    arith: Arith | None = None,
    divides: bool = True,
) -> Plan:
    """Plan `choice` over `nodes`: exactly these if the choice names nodes, else the best of them.

    The first node is the one that was asked. What was not measured is assumed as
    placement/estimate.py says. `holdings` say what nodes have of the model; one that is not there
    is taken to have all. The `silent` nodes would be candidates if they had answered: the
    plan, or the error, names them. `arith` is that of the figures, None for what these nodes
    settle on. Unless it `divides` there is one ring, whatever several would give.

    Raises PlanError if the model does not fit, UsageError for a context that the model does not
    have, for an unknown dtype, and where `mtp` is asked for and the model has no such layer, or the
    stage would be cut over nodes or devices.
    """
    if choice.mtp_if_fits:
        given = facts, nodes, measured, silent, holdings, arith, divides
        plain = make_plan(structs.replace(choice, mtp=False, mtp_if_fits=False), *given)
        return _drafting_plan(plain, given) if facts.has_mtp else plain
    inputs = _Inputs(choice, facts, nodes, measured, silent, holdings, arith)
    division = _division(inputs) if divides else None
    if division is not None:
        return _divided(division, inputs)
    try:
        inputs.candidates = _in_order(inputs)
        placement = next(place for applies, place in _STRATEGIES if applies(inputs))(inputs)
    except PlanError as error:
        if silent:
            message = f"{error.message}; {silent_words(silent)}"
            raise PlanError(message, remedy=error.remedy) from None
        raise
    plan = _planned(inputs, placement)
    return plan.with_standbys(
        choice.standby, [node for node in inputs.nodes if node not in plan.nodes]
    )


def _drafting_plan(plain: Plan, given: tuple[Any, ...]) -> Plan:
    """Plan the layer that predicts further tokens too, if that takes no more nodes than without."""
    with contextlib.suppress(PlanError, UsageError):
        plan = make_plan(structs.replace(plain.choice, mtp=True), *given)
        if len(plan.nodes) <= len(plain.nodes):
            return replace(plan, choice=structs.replace(plan.choice, mtp_if_fits=True))
    return plain


def weighed_plan(
    choice: ModelChoice, facts: ModelFacts, nodes: Sequence[NodeInfo], *given: Any
) -> Plan:
    """Plan as `make_plan`, and predict the joules of that ring and of those without a node of it.

    Nodes that were named are all needed but that one; the layers are then the planner's.
    """
    plan = make_plan(choice, facts, nodes, *given)
    joules = joules_a_token(plan.members, plan.predicted_tok_s)
    if joules is None:
        return plan
    rings = []
    for node in plan.members[:MOST_WITHOUT] if len(nodes) > 1 else ():
        left = [each for each in nodes if each.node != node.node]
        named = [each.address for each in left] if choice.nodes else []
        fewer = structs.replace(choice, nodes=named, layers=[])
        with contextlib.suppress(PlanError, UsageError):
            other = make_plan(fewer, facts, left, *given)
            rings.append(ring_without(node, other.members, other.predicted_tok_s))
    without = [ring for ring in rings if ring is not None]
    told = [f"{n.name}: {' + '.join(m.source for m in n.meters)}" for n in plan.members]
    energy = PlannedEnergy(joules_per_token=joules, sources=told, without=without)
    return replace(plan, energy=energy)


class _Inputs:
    """What a plan is made of: what was asked for, and what it comes to with these nodes.

    `known` are the nodes that were given, `nodes` those that may be in the ring. `disks` are the
    rates of their disks by id, None where one was not measured.
    """

    def __init__(
        self,
        choice: ModelChoice,
        facts: ModelFacts,
        known: Sequence[NodeInfo],
        measured: Measured,
        silent: Sequence[LeftOut],
        holdings: Holdings,
        arith: Arith | None,
    ) -> None:
        """Settle what can be said before anything is placed. Raises as make_plan."""
        self.choice, self.known, self.nodes = choice, known, known
        self.measured, self.silent, self.holdings = measured, silent, holdings
        if choice.mtp:
            facts = facts.with_mtp()
            remedy = "start it with --tensor-parallel 1, or leave --mtp out"
            self.nodes = _uncut(choice, self.nodes, lambda name: mtp_not_cut(name, remedy))
        if choice.adapters:
            self.nodes = _uncut(choice, self.nodes, lambda _: adapters_not_cut())
        self.facts, nodes = facts, self.nodes
        self.objective = Objective(choice.optimise) if choice.optimise else Objective.LATENCY
        self.context = _context(choice, facts.config)
        self.dtype = dtype = settle_dtype(choice.dtype, facts.config, nodes)
        self.arith = arith or settle_arith(choice.arith, nodes)
        wires, width = parse_wires(choice.wire_dtype), facts.config.row_width
        self.gather = wires.gather
        self.forms = forms_of(facts, nodes, dtype, choice.arith, self.arith)
        in_order = bool(choice.nodes)
        shapes = Shapes(
            facts=facts,
            context=self.context,
            wire=wires.every or WireDType.own(dtype),
            gather=wires.gather,
            quantization=QuantizationChoice.of(choice),
            narrow_hops=narrow_hops(wires, dtype, nodes, measured.links, width, in_order=in_order),
        )
        rates = {told.node: told.disk_bytes_per_s or 0.0 for told in measured.reports}
        self.disks = {
            node: rate if rate >= LEAST_BYTES_PER_S else None for node, rate in rates.items()
        }
        self.shape = shapes.of(self.forms[NodeId(nodes[0].node)])
        of_nodes = self.disks, shapes, self.forms, self.arith, self.objective
        self.candidates: Sequence[CandidateNode] = candidates_of(
            facts, dtype, nodes, measured, *of_nodes, holdings
        )

    @property
    def layers(self) -> list[LayerRange] | None:
        """The layers of each stage, None where the choice leaves them to the plan."""
        return [LayerRange(start, end) for start, end in self.choice.layers] or None

    @property
    def is_exact(self) -> bool:
        """Whether all of the candidates are in the ring, in their order."""
        return bool(self.choice.nodes or self.choice.layers)

    @property
    def n_each(self) -> int:
        """How many nodes a stage spans, 0 for as it pays."""
        return self.choice.nodes_per_stage

    @property
    def cpus(self) -> set[NodeId]:
        """The nodes that stages may span: CPUs, of several devices the first one alone works."""
        return {NodeId(node.node) for node in self.nodes if node.device.startswith("cpu")}


def _planned(inputs: _Inputs, placement: Placement) -> Plan:
    """Make the plan of a placement."""
    choice, facts, measured, dtype = inputs.choice, inputs.facts, inputs.measured, inputs.dtype
    left_out = (*placement.left_out, *_sharing(inputs.known, inputs.nodes))
    placement = replace(placement, left_out=left_out)
    by_node = {node.node: node for node in inputs.nodes}
    ring = tuple(by_node[stage.node] for stage in placement.stages)
    on_ring = settle_wires(choice.wire_dtype, dtype, ring, measured.links)
    spans = tuple(tuple(by_node[n] for n in stage.shards) for stage in placement.stages)
    plan = Plan(
        choice=choice,
        facts=facts,
        dtype=dtype,
        arith=inputs.arith,
        forms=tuple(inputs.forms[stage.node] for stage in placement.stages),
        wires=on_ring,
        wire_saved_s=_saved_s(placement, measured.links, dtype, on_ring, facts.config.row_width),
        context=inputs.context,
        nodes=ring,
        placement=placement,
        left_out_names={NodeId(node.node): node.name for node in inputs.known},
        measured=measured,
        objective=inputs.objective,
        chunk_s=_chunk_s(placement, inputs.shape, measured, inputs.disks),
        silent=tuple(inputs.silent),
        holders=tuple(source.node for source in holders_of(facts, inputs.holdings)),
        spans=spans if any(spans) else (),
        gather_dtype=inputs.gather,
    )
    return with_conversations(plan)


def _uncut(
    choice: ModelChoice, nodes: Sequence[NodeInfo], refusal: Callable[[str], UsageError]
) -> Sequence[NodeInfo]:
    """Return the nodes that were not started to share each layer between their devices.

    Raises the `refusal` for one of those that is needed, being named or asked first.
    """
    cutting = [node for node in nodes if tensor_parallel_of(node) > 1]
    needed = [node.name for node in cutting if choice.nodes or node is nodes[0]]
    if needed:
        raise refusal(needed[0])
    return [node for node in nodes if node not in cutting]


def _sharing(known: Sequence[NodeInfo], nodes: Sequence[NodeInfo]) -> list[Exclusion]:
    """Say of the nodes that `_uncut` has left out why."""
    left = {node.node for node in nodes}
    why = "its devices share each layer, and what --mtp and --lora add cannot be cut"
    return [Exclusion(node=NodeId(n.node), why=why) for n in known if n.node not in left]


def _division(inputs: _Inputs) -> Division | None:
    """Divide the nodes among several rings, where that does more of what is asked for.

    None where it does not, where something fixes one ring, and where others do not reach all nodes.
    Adapters do: they are read by the head of a ring, which alone has them.
    """
    choice = inputs.choice
    named = choice.nodes or choice.layers or choice.adapters
    is_fixed = named or choice.stream_layers or choice.nodes_per_stage > 1
    if inputs.objective is not Objective.THROUGHPUT or is_fixed:
        return None
    if not all(node.address for node in inputs.nodes):
        return None
    return divide(inputs.shape, inputs.candidates, inputs.measured.links)


def _divided(division: Division, inputs: _Inputs) -> Plan:
    """Plan each ring as if its nodes had been named, so that all compute the same bits.

    The first is that of which the asked node is the head, if there is one.
    """
    nodes, measured, holdings, arith = inputs.nodes, inputs.measured, inputs.holdings, inputs.arith
    known = {node.node: node for node in nodes}
    choice = structs.replace(inputs.choice, dtype=inputs.dtype.value)
    if arith is Arith.PORTABLE:
        choice = structs.replace(choice, arith=arith.value)

    def planned(ring: Sequence[CandidateNode]) -> Plan:
        infos = [known[candidate.node] for candidate in ring]
        named = structs.replace(choice, nodes=[info.address for info in infos])
        return make_plan(named, inputs.facts, infos, measured, (), holdings, arith)

    asked = nodes[0].node
    first, *beside = sorted(map(planned, division.rings), key=lambda p: p.nodes[0].node != asked)
    members = {node.node for ring in (first, *beside) for node in ring.nodes}
    left_out = tuple(
        Exclusion(node=NodeId(node.node), why="no faster with it, as far as is known")
        for node in nodes
        if node.node not in members
    )
    return replace(
        first,
        beside=tuple(beside),
        placement=replace(first.placement, left_out=left_out, why=division.why),
        left_out_names={NodeId(node.node): node.name for node in nodes},
        silent=tuple(inputs.silent),
    )


def _with_another_model(
    facts: ModelFacts, nodes: Sequence[NodeInfo], holdings: Holdings
) -> list[LeftOut]:
    """Name the nodes that have another whole checkpoint where the model of `facts` should be."""
    found = []
    for node in nodes:
        held = holdings.get(NodeId(node.node))
        if held is not None and held.is_complete and held.model_id != facts.model_id:
            why = f"it has another model there: {held.model_id[:12]}"
            found.append(LeftOut(node=node.node, name=node.name, why=why))
    return found


def plan_again(
    choice: ModelChoice,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    measured: Measured,
    silent: Sequence[LeftOut],
    holdings: Holdings,
    arith: Arith,
) -> Plan:
    """Plan one ring as `make_plan`, with the first node as head, which has the requests.

    If the choice names nodes, `nodes` are those of them that are left. Nodes with another model at
    the same path are left out: with them no ring could be built.
    """
    unlike = _with_another_model(facts, nodes[1:], holdings)
    silent, left_out = (*silent, *unlike), {one.node for one in unlike}
    nodes = [node for node in nodes if node.node not in left_out]
    head, *others = nodes

    def exactly(ring: Sequence[NodeInfo]) -> Plan:
        n_each = choice.nodes_per_stage
        named = structs.replace(
            choice,
            nodes=[node.address for node in ring],
            nodes_per_stage=n_each if n_each and not len(ring) % n_each else 0,
        )
        return make_plan(named, facts, ring, measured, silent, holdings, arith)

    if choice.nodes:
        return exactly(nodes)
    plan = make_plan(choice, facts, nodes, measured, silent, holdings, arith, divides=False)
    if plan.nodes[0].node == head.node:
        return plan
    chosen = [node for node in plan.nodes if node.node != head.node]
    for ring in ([head, *chosen], [head, *chosen[1:]]):
        with contextlib.suppress(PlanError):
            return exactly(ring)
    return exactly([head, *others])


WORTH_WAKING: Final = 1.5
"""How many times as fast a ring has to be with nodes that sleep, for them to be woken."""


def is_worth_waking(plan: Plan | PlanError, wider: Plan) -> bool:
    """Say whether the nodes that are asleep in `wider` should be woken for it.

    `plan` does without them, or says why that cannot be.
    """
    if isinstance(plan, PlanError) or not wider.asleep:
        return isinstance(plan, PlanError)
    now, then = plan.predicted_tok_s, wider.predicted_tok_s
    return now is not None and then is not None and then >= WORTH_WAKING * now


def unneeded(info: NodeInfo) -> LeftOut:
    """Say of a node that is asleep why a plan does without it."""
    return LeftOut(node=info.node, name=info.name, why=f"{words(info)}; it is not needed")


def fits(facts: ModelFacts, nodes: Sequence[NodeInfo]) -> bool:
    """Estimate whether a model fits the memory of some ring of `nodes`, with no flag given.

    By memory alone, as if nothing had been measured: no speed is looked at.
    """
    shape, candidates = unmeasured(facts, nodes)
    return fits_somehow([candidate.held(shape) for candidate in candidates])


def unmeasured(
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    choice: ModelChoice = NO_FLAGS,
    arith: Arith | None = None,
) -> tuple[ModelShape, list[CandidateNode]]:
    """Describe a model and `nodes` as a plan sees them, with nothing measured.

    The shape is that on the first node, without one as most would hold it. The context is the usual
    one; `arith` is None for what the nodes settle on.
    """
    dtype = settle_dtype(choice.dtype, facts.config, nodes)
    arith = arith or settle_arith(choice.arith, nodes)
    shapes = Shapes(
        facts=facts,
        context=facts.config.default_context,
        wire=WireDType.own(dtype),
        quantization=QuantizationChoice.of(choice),
        narrow_hops={},
    )
    forms = forms_of(facts, nodes, dtype, choice.arith, arith)
    found = candidates_of(facts, dtype, nodes, NOTHING_MEASURED, {}, shapes, forms, arith)
    usual = NodeForm(dtype=dtype, linear=dtype, arithmetic="", by_library=False)
    return shapes.of(forms[NodeId(nodes[0].node)] if nodes else usual), found


def _resident(inputs: _Inputs) -> Placement:
    """Place all layers in memory."""
    shape, layers, links, n_each = inputs.shape, inputs.layers, inputs.measured.links, inputs.n_each

    def on(candidates: Sequence[CandidateNode]) -> Placement:
        spanned = [first_device(candidate) for candidate in candidates]
        if n_each > 1 and inputs.is_exact:
            if not {candidate.node for candidate in candidates} <= inputs.cpus:
                raise PlanError(
                    "--nodes-per-stage: a stage spans CPUs only, the first device of each node, "
                    "and a node's first one is another",
                    remedy="name nodes whose first --device is a CPU",
                )
            stages = grouped(shape, spanned, links, n_each)
            return place_exactly(shape, stages, layers, links, inputs.objective)
        if n_each > 1:
            return place_span(shape, spanned, links, n_each, inputs.cpus)
        if inputs.is_exact:
            return place_exactly(shape, candidates, layers, links, inputs.objective)
        best = place(shape, candidates, links, inputs.objective)
        if n_each:
            return best
        return weigh_spans(shape, spanned, links, inputs.objective, best, inputs.cpus)

    return place_over_devices(on, inputs.candidates, shape.n_layers, inputs.objective)


def _as_little_streamed(inputs: _Inputs) -> Placement:
    """Place all layers in memory, or else as many as fit there."""
    try:
        return _resident(inputs)
    except PlanError:
        is_whole = inputs.facts.config.outline is not None or inputs.n_each > 1
        placement = None if is_whole else _streaming(inputs, None)
        if placement is None:
            raise
        return placement


def _streamed(inputs: _Inputs) -> Placement:
    """Place with so many layers of each stage on disk. Raises as make_plan."""
    n_streamed, n_layers = inputs.choice.stream_layers, inputs.shape.n_layers
    assert n_streamed != "auto", "another strategy applies before"
    if inputs.n_each > 1:
        raise UsageError(
            "--stream-layers: layers that nodes share (--nodes-per-stage) are not read from disk",
            remedy="leave out one of the two: disks of nodes with layers of their own read at once",
        )
    if (outline := inputs.facts.config.outline) is not None:
        raise outline.refusal("--stream-layers")
    if n_streamed > n_layers:
        raise UsageError(
            f"--stream-layers {n_streamed}: the model has {n_layers} layers",
            remedy=f"give {n_layers} or fewer, or auto for as few as needed",
        )
    placement = _streaming(inputs, n_streamed)
    if placement is None:
        raise PlanError(
            f"--stream-layers {n_streamed}: the other layers do not fit these nodes",
            remedy="use --stream-layers auto",
        )
    return placement


_STRATEGIES: Sequence[tuple[Callable[[_Inputs], bool], Callable[[_Inputs], Placement]]] = (
    (lambda inputs: not inputs.choice.stream_layers, _resident),
    (lambda inputs: inputs.choice.stream_layers == "auto", _as_little_streamed),
    (lambda _: True, _streamed),
)
"""Whether a way of placing applies, and the way; the first that applies is taken."""


def _streaming(inputs: _Inputs, n_streamed: int | None) -> Placement | None:
    """Place with layers on disk: `n_streamed` of each stage, None for as few as needed."""
    facts, candidates = inputs.facts, inputs.candidates
    if all(candidate.held(inputs.shape).shape.streaming is None for candidate in candidates):
        linear = inputs.forms[candidates[0].node].linear
        check_streamable(facts.path, facts.stored_dtype, facts.packed, linear)
    return place_streaming(
        inputs.shape,
        [first_device(candidate) for candidate in candidates],
        inputs.layers,
        inputs.measured.links,
        inputs.objective,
        exactly=inputs.is_exact,
        n_streamed=n_streamed,
    )


def _in_order(inputs: _Inputs) -> Sequence[CandidateNode]:
    """Return the candidates: as many as the stages take, where only their layers are given."""
    layers, candidates = inputs.choice.layers, inputs.candidates
    if not layers or inputs.choice.nodes:
        return candidates
    n_needed = len(layers) * max(1, inputs.n_each)
    if n_needed > len(candidates):
        raise _too_few_nodes(len(layers), n_needed, candidates)
    return candidates[:n_needed]


def _too_few_nodes(n_ranges: int, n_needed: int, candidates: Sequence[CandidateNode]) -> PlanError:
    known = "only one node is known"
    if len(candidates) > 1:
        names = ", ".join(candidate.name for candidate in candidates[:LISTED])
        known = f"only {len(candidates)} nodes are known ({names})"
    n_each = n_needed // n_ranges
    each = "one for each node" if n_each == 1 else f"one for each {n_each} nodes"
    return PlanError(
        f"--layers has {n_ranges} ranges, {each}, and {known}",
        remedy=f"name {n_needed} nodes with --nodes, start them with --local {n_needed}, or give "
        "fewer ranges",
    )


def _context(choice: ModelChoice, config: ModelConfig) -> int:
    if choice.context > config.max_positions:
        most = f"the model has {config.max_positions} positions at most"
        raise UsageError(f"--context {choice.context}: {most}")
    return choice.context or config.default_context


def _chunk_s(
    placement: Placement, shape: ModelShape, measured: Measured, disks: Mapping[str, float | None]
) -> float | None:
    """Return the seconds that a chunk takes in all stages, reading from their disks included.

    None if a stage, or the disk that it streams from, was not measured.
    """
    total_s = 0.0
    for stage in placement.stages:
        speed, read_bytes = measured.speeds.get(stage.node), shape.read_bytes(stage.n_streamed)
        bytes_per_s = disks.get(stage.node)
        if speed is None or (read_bytes and not bytes_per_s):
            return None
        layers_s = len(stage.layers) * speed.layer_256_s + speed.head_s
        shares = stage.shares or (1,) * (1 + len(stage.shards))
        total_s += layers_s * shares[0] / sum(shares) + speed.embed_s
        if bytes_per_s:
            total_s += read_bytes / bytes_per_s
    return total_s


def _saved_s(
    placement: Placement, links: Links, dtype: DType, wires: Sequence[WireDType], width: int
) -> float | None:
    """Return the seconds that `wires` save on all links of a row's way, against the ring's dtype.

    None if one of them was not measured.
    """
    total_s, own_bytes = 0.0, WireDType.own(dtype).row_bytes(width)
    hops = pairwise(stage.node for stage in placement.stages)
    for (sender, receiver), wire in zip(hops, wires, strict=True):
        link = links.get((sender, receiver)) or links.get((receiver, sender))
        if link is None:
            return None
        total_s += link.send_s(own_bytes - wire.row_bytes(width))
    return total_s
