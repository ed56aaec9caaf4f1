"""A plan with everything a ring needs to be built from it, and the message that describes it.

Must not know how a plan is made (placing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from msgspec import structs

from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, WRONG_BY, Measured, StageRun
from shardnet.cluster.peers.sleepers import words
from shardnet.cluster.placement.figures import (
    Exclusion,
    Objective,
    PartPlan,
    Placement,
    StagePlan,
)
from shardnet.cluster.placement.standbys import Standby, choose_standbys, without_stage
from shardnet.cluster.placement.words import LISTED
from shardnet.cluster.planning.ring_dtypes import NodeForm, exactness, unused_links, wire_name
from shardnet.cluster.sharing.adapter_sharing import ring_adapter
from shardnet.model.config.panel_form import Quantization
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.memory_estimate import WeightForm, graph_bytes, mtp_weight_bytes
from shardnet.types import Arith, DType, Epoch, NodeId, WireDType
from shardnet.wire.messages import plans
from shardnet.wire.messages.deputies import RingNode, StandBy
from shardnet.wire.messages.extras import RecommendedSampling
from shardnet.wire.messages.generation import Timing
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.membership import NodeInfo

INT4_COSTS: Final = (
    "--quant int4 costs quality: on two small real models perplexity rose by 26 % and by 43 %, "
    "with int8 by 0.5 % on the first; --quant int8 is recommended"
)
"""The figures are those of docs/benchmarks.md."""

FAR_OFF: Final = 1.2
"""A prediction of tokens per second that is off by more is learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan with everything a ring needs to be built from it.

    `arith` is the ring's arithmetic, `forms` are those in which its nodes hold the model, `wires`
    the dtypes of its links from stage to stage. `wire_saved_s`: seconds per token that the wire
    dtype saves on all links together, against sending in the ring's dtype; None where a link was
    not measured. `chunk_s`: predicted seconds of a whole prompt chunk in all stages together,
    without the links; None where a stage was not measured. `silent` nodes did not report their
    state in time, drain or rest. `holders` are the nodes that have the model, among the candidates.
    `spares` are nodes beside the ring that may stand by, and `standbys` say who does. `nodes` are
    the members of the ring; `spans` has the further nodes of each stage, and is () where no stage
    spans several. Their parts travel in `gather_dtype`, None for their own. `beside` are the plans
    of the other rings behind the same head. `turns` and `kept` are of long conversations.
    `energy` is what is predicted of joules, None unless it was asked for and is known.
    """

    choice: plans.ModelChoice
    facts: ModelFacts
    dtype: DType
    arith: Arith
    forms: tuple[NodeForm, ...]
    wires: tuple[WireDType, ...]
    wire_saved_s: float | None
    context: int
    nodes: tuple[NodeInfo, ...]
    placement: Placement
    left_out_names: dict[NodeId, str]
    measured: Measured = NOTHING_MEASURED
    objective: Objective = Objective.LATENCY
    chunk_s: float | None = None
    silent: tuple[plans.LeftOut, ...] = ()
    holders: tuple[NodeId, ...] = ()
    standbys: tuple[Standby, ...] = ()
    spares: tuple[NodeInfo, ...] = ()
    spans: tuple[tuple[NodeInfo, ...], ...] = ()
    gather_dtype: WireDType | None = None
    beside: tuple[Plan, ...] = ()
    turns: plans.PlannedTurns | None = None
    kept: plans.KeptPositions | None = None
    energy: plans.PlannedEnergy | None = None

    @property
    def predicted_tok_s(self) -> float | None:
        """The tokens per second of all rings together, None where that of one is not known."""
        return _sum(ring.placement.predicted_tok_s for ring in self.rings)

    @property
    def rings(self) -> tuple[Plan, ...]:
        """The plans of all rings behind this head, its own first."""
        return (self, *self.beside)

    @property
    def members(self) -> tuple[NodeInfo, ...]:
        """The nodes of all rings."""
        return tuple(node for ring in self.rings for node in ring.ring_nodes)

    @property
    def asleep(self) -> list[NodeInfo]:
        """Those of them that have to wake before anything is built."""
        return [node for node in self.members if node.asleep is not None]

    @property
    def ring_nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes of this ring, those of one stage one behind the other."""
        if not self.spans:
            return self.nodes
        stages = zip(self.nodes, self.spans, strict=True)
        return tuple(node for first, further in stages for node in (first, *further))

    @property
    def gathers(self) -> list[WireDType | None]:
        """The dtype of parts in each stage, None where nothing narrows them."""
        spans = self.spans or [()] * len(self.nodes)
        return [self.gather_dtype if further else None for further in spans]

    @property
    def exactness(self) -> plans.RingExactness:
        """What changes no bit of this ring's outputs."""
        return exactness(self.nodes, self.forms, self.dtype, self.wires, self.gathers)

    def with_standbys(
        self, standby: Literal["", "kv", "auto"], spares: Sequence[NodeInfo] = ()
    ) -> Plan:
        """Return this plan with who stands by for whom, of its nodes and those beside it."""
        if self.spans or not standby:  # what such a stage has is on several nodes
            return self
        graphs_bytes = graph_bytes(self.facts.config, self.dtype)
        memory = {
            NodeId(node.node): node.memory_bytes - graphs_bytes * node.device.startswith("cuda")
            for node in (*self.nodes, *spares)
        }
        return replace(
            self,
            choice=structs.replace(self.choice, standby=standby),
            standbys=choose_standbys(
                self.placement.stages, memory, holds_weights=standby == "auto"
            ),
            spares=tuple(spares),
        )

    def without_stage(self, standby: Standby) -> Plan:
        """Return the plan of the ring that goes on when the stage of `standby` is lost."""
        nodes, forms, wires = [*self.nodes], [*self.forms], [*self.wires]
        spare = next((node for node in self.spares if node.node == standby.node), None)
        if spare is not None:
            nodes[standby.rank] = spare
        else:
            ranks = [rank for rank, node in enumerate(nodes) if node.node == standby.node]
            del wires[min(standby.rank, *ranks)]
            del nodes[standby.rank], forms[standby.rank]
        plan = replace(
            self,
            nodes=tuple(nodes),
            forms=tuple(forms),
            wires=tuple(wires),
            placement=without_stage(self.placement, standby),
            turns=None,
            kept=None,
        )
        spares = [node for node in self.spares if node is not spare]
        return plan.with_standbys(self.choice.standby, spares)

    def instead_of(self, opened: Plan, former: Plan, without: Mapping[NodeId, str]) -> Plan:
        """Return this plan for a ring that replaces that of `former`, for what `opened` was for.

        Nodes of theirs that are not there, or are left out for a reason in `without`, are named.
        """
        told = {*self.left_out_names, *(out.node for out in self.silent)}
        known = {node.node: node for node in (*opened.ring_nodes, *former.ring_nodes)}
        missing = [node for node in known.values() if node.node not in told]
        out = [
            Exclusion(node=NodeId(node.node), why=without.get(NodeId(node.node), "it was lost"))
            for node in missing
        ]
        names = {NodeId(node.node): node.name for node in missing}
        return replace(
            self,
            choice=opened.choice,
            placement=replace(self.placement, left_out=(*self.placement.left_out, *out)),
            left_out_names=self.left_out_names | names,
        )

    def computes(self, choice: plans.ModelChoice) -> bool:
        """Say whether its rings compute what `choice` asks for, by whichever nodes and links.

        Settings that a choice leaves open match, but for the options of its stages.
        """
        had = self.choice
        return (
            structs.replace(choice, mtp=choice.mtp and not choice.mtp_if_fits).are_met_by(had)
            and choice.context in (0, self.context)
            and choice.dtype in ("auto", self.dtype.value)
            and all(adapter in had.adapters for adapter in choice.adapters)
            and choice.arith in ("auto", self.arith.value)
            and choice.nodes_per_stage in (0, had.nodes_per_stage)
            and choice.threads in (0, had.threads)
            and choice.optimise in ("", self.objective.value)
            and (choice.ignore_unknown_config or not self.facts.unknown_keys)
        )

    def stand_by(self, epoch: Epoch) -> StandBy:
        """Say what the deputy of a ring with this plan needs to know."""
        return StandBy(
            epoch=epoch,
            choice=self.choice,
            model_id=self.facts.model_id,
            dtype=self.dtype.value,
            arith=self.arith.value,
            context=self.context,
            nodes=[RingNode(node=node.node, address=node.address) for node in self.ring_nodes],
            adapters=[ring_adapter(each) for each in self.facts.adapters],
        )

    @property
    def why(self) -> str:
        """Why this plan was chosen, who sleeps, and which nodes could not be asked."""
        silent = [silent_words(self.silent)] if self.silent else []
        return "; ".join([self.placement.why, *map(words, self.asleep), *silent])

    @property
    def warnings(self) -> list[str]:
        """What is dubious about the model as it was chosen, one line each."""
        found = []
        if self.facts.config.outline is not None:
            found.append(by_modules_words(self.facts.config.family))
        if self.facts.unknown_keys:
            found.append(ignored_words(self.facts.unknown_keys))
        if unused := unused_links(self.choice.wire_dtype, self.nodes):
            found.append(f"--wire-dtype: {', '.join(unused[:LISTED])} is no link of this ring")
        packed = self.facts.packed
        is_4_bit = packed is not None and packed.nearest is Quantization.INT4
        if self.choice.quant == Quantization.INT4.value and not is_4_bit:
            found.append(INT4_COSTS)
        return found

    @property
    def narrowed(self) -> dict[int, WireDType]:
        """First layers of the stages before which a wire rounds, each with that wire's dtype."""
        own, stages = WireDType.own(self.dtype), self.placement.stages[1:]
        borders = zip((stage.layers.start for stage in stages), self.wires, strict=True)
        return {border: wire for border, wire in borders if wire is not own}

    @property
    def rounded_parts(self) -> dict[int, tuple[WireDType, tuple[int, ...]]]:
        """Layers whose parts are rounded on their way, with their dtype and the nodes' shares."""
        at = zip(self.placement.stages, self.gathers, self.forms, strict=True)
        return {
            layer: (wire, stage.shares or (1,) * (1 + len(stage.shards)))
            for stage, wire, form in at
            if wire is not None and wire is not WireDType.own(form.dtype)
            for layer in stage.layers
        }

    def weight_form(self, form: NodeForm) -> WeightForm:
        """Say in which form a node of `form` holds weights, keys and values."""
        return WeightForm(
            dtype=form.dtype,
            quant=None if form.unpacks else Quantization.named(self.choice.quant),
            linear_dtype=form.linear,
            packed=None if form.unpacks else self.facts.packed,
            held_dtype=form.held,
        )

    def disproved_by(self, alone_s: Sequence[float], timing: Timing) -> list[StageRun]:
        """List the stages of which a generation says otherwise than the plan.

        `alone_s` are the seconds that each stage took for one token. The head is listed too where
        the tokens per second were predicted FAR_OFF times too high or low: for its fixed step.
        """
        stages = self.placement.stages
        if len(alone_s) != len(stages) or any(stage.n_streamed for stage in stages):
            return []
        if self.spans:  # such a stage's time is that of no node alone
            return []
        predicted_s = [stage.compute_s for stage in stages]
        tok_s, told_tok_s = timing.decode_tok_s, self.placement.predicted_tok_s
        is_off = (
            self.objective is Objective.LATENCY
            and told_tok_s is not None
            and tok_s > 0
            and _differ(tok_s, told_tok_s, FAR_OFF)
        )
        beside_ms = sum(stage.compute_ms + stage.wire_ms for stage in timing.per_stage)
        step_s = max(0.0, 1 / tok_s - beside_ms / 1e3) if is_off else None
        return [
            StageRun(
                node=stage.node,
                layers=stage.layers,
                compute_s=took_s,
                step_s=step_s if rank == 0 else None,
            )
            for rank, (stage, took_s, told_s) in enumerate(
                zip(stages, alone_s, predicted_s, strict=True)
            )
            if told_s is not None
            and (_differ(took_s, told_s, WRONG_BY) or (rank == 0 and step_s is not None))
        ]

    def _sources(self, stage: StagePlan) -> list[str]:
        """Name the nodes that those of a stage may fetch from, at most LISTED."""
        holders = [other for other in self.holders if stage.shards or other != stage.node]
        return [self.left_out_names[other] for other in holders][:LISTED]

    def reply(self, request: int, wire: plans.NarrowWire | None = None) -> plans.PlanReply:
        """Make the message for a client. `wire` says what a narrower wire saves and costs."""
        recommended: dict[str, Any] = dict(self.facts.recommended)
        return plans.PlanReply(
            request=request,
            model=self.choice.model,
            model_id=self.facts.model_id,
            dtype=self.dtype.value,
            wire_dtype=wire_name(self.wires, self.dtype),
            context=self.context,
            stages=self._stages(),
            left_out=[
                plans.LeftOut(node=out.node, name=self.left_out_names[out.node], why=out.why)
                for out in self.placement.left_out
            ]
            + list(self.silent),
            predicted_tok_s=self.predicted_tok_s,
            why=explanation(self.why),
            optimise=self.objective.value,
            nodes=list(self.measured.reports),
            links=self.measured.ways,
            wire=wire,
            quant=self.choice.quant,
            kv_dtype=self.choice.kv_dtype,
            warnings=[explanation(warning) for warning in self.warnings],
            recommended=RecommendedSampling(**recommended) if recommended else None,
            arith=self.arith.value,
            exact=exactness(
                [node for ring in self.rings for node in ring.nodes],
                [form for ring in self.rings for form in ring.forms],
                self.dtype,
                [wire for ring in self.rings for wire in ring.wires],
                [wire for ring in self.rings for wire in ring.gathers],
                outline=self.facts.config.outline,
            ),
            standbys=[self._planned(standby) for standby in self.standbys],
            mtp_bytes=mtp_weight_bytes(self.facts.config, self.weight_form(self.forms[-1])),
            tower_bytes=self.facts.tower_bytes.get(self.dtype, 0),
            picture_s=self._picture_s(),
            rings=[
                plans.PlannedRing(
                    stages=ring._stages(), predicted_tok_s=ring.placement.predicted_tok_s
                )
                for ring in self.rings
                if self.beside
            ],
            adapters=[
                plans.PlannedAdapter(each.name, sum(part.memory_bytes for part in each.parts))
                for each in self.facts.adapters
            ],
            turns=self.turns,
            kept=self.kept,
            energy=self.energy,
            asleep=[
                plans.SleepingNode(node=node.node, name=node.name, wake_s=node.asleep.wake_s)
                for node in self.members
                if node.asleep is not None
            ],
        )

    def _picture_s(self) -> float | None:
        """Predict how long the first stage encodes a picture; None where that is not known."""
        speed = self.measured.speeds.get(self.placement.stages[0].node)
        return self.facts.picture_layers * speed.layer_256_s or None if speed else None

    def _stages(self) -> list[plans.PlannedStage]:
        looked_up = self.facts.layers.looked_up
        return [
            plans.PlannedStage(
                rank=rank,
                node=node.node,
                name=node.name,
                address=node.address,
                layers=(stage.layers.start, stage.layers.end),
                weight_bytes=stage.weight_bytes,
                kv_bytes=stage.kv_bytes,
                compute_ms=_ms(stage.compute_s),
                hop_ms=_ms(stage.hop_s),
                streamed_layers=stage.n_streamed,
                fetch_bytes=stage.fetch_bytes,
                fetch_s=stage.fetch_s,
                fetch_from=self._sources(stage) if stage.fetch_bytes else [],
                dtype=form.dtype.value,
                weight_dtype=form.linear.value,
                wire_dtype=self.wires[rank].value if rank < len(self.wires) else "",
                arithmetic=form.arithmetic,
                shards=self._shards(rank),
                shares=[*stage.shares],
                parts=[_part(part) for part in stage.parts],
                parts_why=explanation(stage.parts_why),
                looked_up_bytes=sum(looked_up[stage.layers.start : stage.layers.end]),
                rows_from=self._sources(stage) if stage.asks_rows else [],
                working_bytes=stage.working_bytes,
            )
            for rank, (node, stage, form) in enumerate(
                zip(self.nodes, self.placement.stages, self.forms, strict=True)
            )
        ]

    def _shards(self, rank: int) -> list[plans.PlannedShard]:
        further = self.spans[rank] if self.spans else ()
        return [plans.PlannedShard(node=n.node, name=n.name, address=n.address) for n in further]

    def _planned(self, standby: Standby) -> plans.PlannedStandby:
        layers = self.placement.stages[standby.rank].layers
        return plans.PlannedStandby(
            rank=standby.rank,
            node=standby.node,
            name=self.left_out_names.get(standby.node, standby.node),
            layers=(layers.start, layers.end),
            weight_bytes=standby.weight_bytes,
            kv_bytes=standby.kv_bytes,
        )


def _part(part: PartPlan) -> plans.PlannedPart:
    return plans.PlannedPart(
        layers=(part.layers.start, part.layers.end),
        devices=list(part.names),
        weight_bytes=part.weight_bytes,
        kv_bytes=part.kv_bytes,
        compute_ms=_ms(part.compute_s),
    )


def by_modules_words(family: str) -> str:
    """Say what a model without an implementation of its own goes without."""
    return (
        f"{family} has no implementation of its own here: transformers' own modules compute it, "
        "slower, and a prompt that is cut otherwise may give other bits, after a recovery too, "
        "unless --deterministic"
    )


def ignored_words(unknown: Sequence[str]) -> str:
    """Name the keys of a config that are ignored."""
    return (
        f"--ignore-unknown-config: what the model computes may be wrong, since its config has "
        f"{', '.join(unknown)}, which shardnet does not know"
    )


def _differ(a: float, b: float, times: float) -> bool:
    return not a / times <= b <= a * times


def _sum(rates: Iterable[float | None]) -> float | None:
    """Add rates, None if one of them is not known."""
    known = [*rates]
    return None if None in known else sum(rate for rate in known if rate is not None)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def silent_words(silent: Sequence[plans.LeftOut]) -> str:
    """Name the nodes that could not be asked or are leaving, and why, at most LISTED of them."""
    told = [f"{out.name} ({out.why})" for out in silent[:LISTED]]
    if len(silent) > LISTED:
        told.append(f"and {len(silent) - LISTED} more nodes")
    return f"left out: {', '.join(told)}"
