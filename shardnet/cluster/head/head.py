"""The head's side of a node: plans for clients, and the one ring that this node leads.

Knows which ring stands, whether a request can use it, and when it must give way. Must not know how
clients are told (clients.py) nor how a stage runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from shardnet.cluster.head.busy_backoff import Turn
from shardnet.cluster.head.planning import Plan, make_plan, settle_dtype, settle_wire_dtype
from shardnet.cluster.measuring.measurement import OnMeasured
from shardnet.cluster.measuring.measurement_service import Survey
from shardnet.cluster.peers.node_directory import Candidates
from shardnet.cluster.ring.ring import OnStageProgress, Ring, RingSpec
from shardnet.cluster.ring.stage_host import generating_with
from shardnet.cluster.ring.stage_port import StagePort
from shardnet.cluster.sharing.replica_sources import ReplicaSource, check_same_model, choose_sources
from shardnet.errors import BusyError, ShardnetError
from shardnet.runtime.stage.loading import ModelFacts
from shardnet.tokenizers.tokenizer import Tokenizer, read_eos_ids
from shardnet.types import Epoch, NodeId
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.membership import NodeInfo, RingLoad
from shardnet.wire.messages.plans import ModelChoice

CLOSE_S = 3.0
"""How long a leaving head waits for its stages to be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Another node is or would be the head of a ring with `model`: the client should ask there."""

    address: str
    model: str


class Neighbourhood(Protocol):
    """What the head needs to know of its own node and the others."""

    @property
    def node(self) -> NodeId:
        """This node's id."""

    async def candidates(self, addresses: Sequence[str]) -> Candidates:
        """Return the nodes at `addresses`, or without any this node and all it knows."""

    async def provide(self, model: str, on_progress: Callable[[int, int], None]) -> None:
        """Have a model of the Hub downloaded if no node has it. Takes progress in bytes."""

    async def identify(self, model: str) -> ModelFacts:
        """Look at the model that a path means, on this node or else on its peers."""

    async def holders(
        self, facts: ModelFacts, model: str, plan: Sequence[NodeInfo]
    ) -> list[ReplicaSource]:
        """Ask the nodes of a plan, this one first, and others if need be, what they have of it."""

    @property
    def survey(self) -> Survey:
        """What measures the nodes of a plan and the links between them."""

    async def load_tokenizer(self, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint on this node, None where it has none."""

    async def port(self, node: NodeInfo) -> StagePort:
        """Return the port to a node of a plan."""

    def head_elsewhere(self) -> Elsewhere | None:
        """Return the ring that this node has a seat in under another head, None without one."""

    async def free_stage(self) -> None:
        """Free what this node holds of a ring that is no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A ring that this node leads, its plan, and the texts' tokenizer if the checkpoint has one.

    `load_s` is what loading took for the request at hand, 0 where the ring stood already.
    """

    plan: Plan
    ring: Ring
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    load_s: float


class Head:
    """Keeps at most one ring."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood
        self._changing = asyncio.Lock()
        self._lead: Lead | None = None
        self._epoch = 0
        self._building: Ring | None = None
        """The ring that will stand if nothing goes wrong."""

    @property
    def model(self) -> str | None:
        """The model of the ring that stands, None without one."""
        return self._lead.plan.choice.model if self._lead and not self._lead.ring.broken else None

    @property
    def n_requests(self) -> int:
        """Requests that wait or run on the ring that stands."""
        return self._lead.ring.engine.n_active if self.model is not None and self._lead else 0

    @property
    def load(self) -> RingLoad | None:
        """What the ring that stands has in hand, None without one."""
        if self._lead is None or self._lead.ring.broken is not None:
            return None
        return RingLoad(**asdict(self._lead.ring.engine.counters))

    def check_idle(self) -> None:
        """Raise BusyError, which names the model, while requests run on this node's ring."""
        if self._lead is not None and self._lead.ring.is_busy:
            raise generating_with(self._lead.plan.choice.model)

    async def plan(
        self,
        choice: ModelChoice,
        on_measured: OnMeasured,
        *,
        measure_one: bool = False,
        again: bool = False,
    ) -> Plan | Elsewhere:
        """Plan `choice`, or name the node that would be its head.

        Where there is more than one node to choose from, all are measured first. A single one tells
        what it knows of itself, and measures with `measure_one`. With `again` what nodes remember
        does not do. `on_measured` is told how far that is.

        Raises PlanError, CheckpointError, UsageError or LinkError when there can be no plan.
        """
        candidates = await self._neighbourhood.candidates(choice.nodes)
        nodes = candidates.nodes
        if choice.nodes and nodes[0].node != self._neighbourhood.node:
            return Elsewhere(address=nodes[0].address, model=choice.model)
        facts = await self._neighbourhood.identify(choice.model)
        dtype, survey = settle_dtype(choice.dtype, facts.config, nodes), self._neighbourhood.survey
        if len(nodes) > 1 or measure_one:
            measured = await survey.measured(
                nodes, choice, facts, dtype, again=again, on_measured=on_measured
            )
        else:
            measured = await survey.known(nodes[0], choice, facts, dtype)
        plan = make_plan(choice, facts, nodes, measured, candidates.silent)
        if plan.nodes[0].node != self._neighbourhood.node:
            return Elsewhere(address=plan.nodes[0].address, model=choice.model)
        return plan

    @contextlib.asynccontextmanager
    async def lead(
        self,
        choice: ModelChoice,
        *,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
    ) -> AsyncIterator[Lead | Elsewhere]:
        """Give a ring for `choice`, built if none stands, that nobody unloads meanwhile.

        Raises BusyError when another model's requests run, and what planning or loading raises.
        """
        with contextlib.ExitStack() as stack:
            async with self._changing:
                lead = await self._find_or_build(choice, on_plan, on_progress)
                if isinstance(lead, Lead):
                    stack.enter_context(lead.ring.in_use())
            yield lead

    def elsewhere(self) -> Elsewhere | None:
        """Return the head of the ring that this node is in, None if that is itself or no ring."""
        if self._lead is not None and self._lead.ring.broken is None:
            return None
        return self._neighbourhood.head_elsewhere()

    async def unload(self) -> Elsewhere | None:
        """End the ring and free it on every node, or name the head of the ring this node is in.

        Raises BusyError while requests run, and while a model is being loaded for one.
        """
        if self._building is not None:
            raise BusyError(
                f"this node is loading {self._building.spec.model}: stop the command that asked "
                "for it, or wait until that ends"
            )
        async with self._changing:
            elsewhere = self.elsewhere()
            if elsewhere is not None:
                return elsewhere
            if self._lead is None:
                await self._neighbourhood.free_stage()
                return None
            self.check_idle()
            await self._lead.ring.unload()
            self._lead = None
            return None

    async def close(self) -> None:
        """End the ring, requests or not, within a few seconds.

        One that is being built is freed by who builds it, as soon as who asked for it has gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), self._changing:
                if self._lead is not None:
                    await self._lead.ring.unload()
        self._lead = None

    def ring_broken(self, ring: str, error: ShardnetError) -> None:
        """Take a stage's word that a ring is broken, the one that is being built among them."""
        for ours in (self._building, self._lead.ring if self._lead is not None else None):
            if ours is not None and ours.name == ring:
                ours.lost(f"the ring broke: {error}")

    async def _find_or_build(
        self,
        choice: ModelChoice,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
    ) -> Lead | Elsewhere:
        standing = await self._standing(choice)
        if standing is not None:
            on_plan(standing.plan)
            return standing
        elsewhere = self._ring_elsewhere(choice)
        if elsewhere is not None:
            return elsewhere
        self.check_idle()
        await self._neighbourhood.provide(
            choice.model, lambda done, total: on_progress(0, "downloading", done, total)
        )
        plan = await self.plan(choice, lambda done, total: on_progress(0, "measuring", done, total))
        if isinstance(plan, Elsewhere):
            return plan
        on_plan(plan)
        try:
            return await self._build(plan, on_progress)
        except BusyError:
            elsewhere = self._ring_elsewhere(choice)
            if elsewhere is None:
                raise
            return elsewhere

    def _ring_elsewhere(self, choice: ModelChoice) -> Elsewhere | None:
        """Return another head whose ring with this node, standing or being built, would do."""
        elsewhere = self._neighbourhood.head_elsewhere()
        is_same = elsewhere is not None and elsewhere.model == choice.model
        return elsewhere if is_same and not choice.nodes else None

    async def _standing(self, choice: ModelChoice) -> Lead | None:
        """Return the ring that stands if it is what `choice` asks for, unchanged on disk.

        A client that names no nodes takes any ring with its model; settings it leaves open match,
        but for wire dtype, quantisation and KV dtype: without them nothing is rounded.
        """
        lead = self._lead
        if lead is None or lead.ring.broken is not None or lead.plan.choice.model != choice.model:
            return None
        had, spec = lead.plan.choice, lead.ring.spec
        matches = (
            (not choice.nodes or choice.nodes == had.nodes)
            and (not choice.layers or choice.layers == had.layers)
            and (not choice.context or choice.context == spec.context)
            and (choice.dtype == "auto" or choice.dtype == spec.dtype.value)
            and (choice.quant, choice.kv_dtype) == (had.quant, had.kv_dtype)
            and choice.stream_layers in (0, "auto", had.stream_layers)
            and settle_wire_dtype(choice.wire_dtype, spec.dtype) is spec.wire_dtype
            and (not choice.threads or choice.threads == spec.threads)
            and (not choice.optimise or choice.optimise == lead.plan.objective.value)
        )
        if not matches:
            return None
        facts = await self._neighbourhood.identify(choice.model)
        is_same = (facts.model_id, facts.stamp) == (spec.model_id, spec.stamp)
        return lead if is_same and lead.ring.broken is None else None

    async def _build(self, plan: Plan, on_progress: OnStageProgress) -> Lead:
        """Check that all nodes hold one model, free the old ring, and build the new ring.

        Nodes with which another head builds a ring are waited for, unless that one would do.
        """
        ports = [await self._neighbourhood.port(node) for node in plan.nodes]
        holders = await self._neighbourhood.holders(plan.facts, plan.choice.model, plan.nodes)
        check_same_model(holders[: len(plan.nodes)])
        sources = choose_sources(plan.facts.model_id, holders, limit=MAX_STAGES)
        tokenizer = await self._neighbourhood.load_tokenizer(plan.facts.path)
        eos_ids = tokenizer.eos_ids if tokenizer else read_eos_ids(plan.facts.path)
        if self._lead is not None:
            await self._lead.ring.unload(keep={node.address for node in plan.nodes})
            self._lead = None
        self._epoch += 1
        epoch = Epoch(self._epoch)
        turn = Turn(lambda: self._ring_elsewhere(plan.choice) is not None)
        ring = self._building = Ring(_spec(plan), ports, epoch, sources, plan.chunk_s, turn.wait)
        try:
            load_s = await ring.build(on_progress)
        finally:
            self._building = None
        self._lead = Lead(plan=plan, ring=ring, tokenizer=tokenizer, eos_ids=eos_ids, load_s=0.0)
        return replace(self._lead, load_s=load_s)


def _spec(plan: Plan) -> RingSpec:
    return RingSpec(
        model=plan.choice.model,
        model_id=plan.facts.model_id,
        stamp=plan.facts.stamp,
        addresses=tuple(node.address for node in plan.nodes),
        layers=tuple(stage.layers for stage in plan.placement.stages),
        dtype=plan.dtype,
        quant=plan.choice.quant,
        kv_dtype=plan.choice.kv_dtype,
        streamed=tuple(stage.n_streamed for stage in plan.placement.stages),
        wire_dtype=plan.wire_dtype,
        context=plan.context,
        threads=plan.choice.threads,
        vocab_size=plan.facts.config.vocab_size,
        window=plan.facts.config.smallest_window,
        routing=plan.facts.config.routing,
    )
