"""The head's side of a node: plans for clients, and the one ring that this node leads.

Knows which ring stands, whether a request can use it, and when it must give way. Must not know how
clients are told (clients.py) nor how a stage runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from shardnet.cluster.planning import Plan, check_same_model, make_plan, settle_wire_dtype
from shardnet.cluster.ring import OnStageProgress, Ring, RingSpec
from shardnet.cluster.stage_port import StagePort
from shardnet.errors import BusyError, ShardnetError
from shardnet.model.tokenizer import Tokenizer, read_eos_ids
from shardnet.runtime.loading import ModelFacts, resolve_model, stamp
from shardnet.types import Epoch, NodeId
from shardnet.wire.control import ModelChoice, NodeInfo, RingLoad

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

    async def candidates(self, addresses: Sequence[str]) -> list[NodeInfo]:
        """Return the nodes at `addresses`, or without any this node and all it knows."""

    async def identify(self, model: str) -> ModelFacts:
        """Look at a checkpoint on this node."""

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

    @property
    def model(self) -> str | None:
        """The model of the ring that stands, None without one."""
        return self._lead.plan.choice.model if self._lead and not self._lead.ring.broken else None

    @property
    def load(self) -> RingLoad | None:
        """What the ring that stands has in hand, None without one."""
        if self._lead is None or self._lead.ring.broken is not None:
            return None
        return RingLoad(**asdict(self._lead.ring.engine.counters))

    def check_idle(self) -> None:
        """Raise BusyError, which names the model, while requests run on this node's ring."""
        if self._lead is not None and self._lead.ring.is_busy:
            raise BusyError(
                f"this node is generating with {self._lead.plan.choice.model}: wait until that "
                "ends, or stop it"
            )

    async def plan(self, choice: ModelChoice) -> Plan | Elsewhere:
        """Plan `choice`, or name the node that would be its head.

        Raises PlanError, CheckpointError, UsageError or LinkError when there can be no plan.
        """
        nodes = await self._neighbourhood.candidates(choice.nodes)
        if choice.nodes and nodes[0].node != self._neighbourhood.node:
            return Elsewhere(address=nodes[0].address, model=choice.model)
        facts = await self._neighbourhood.identify(choice.model)
        plan = make_plan(choice, facts, nodes)
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

    async def unload(self) -> Elsewhere | None:
        """End the ring and free it on every node, or name the head of the ring this node is in.

        Raises BusyError while requests run.
        """
        async with self._changing:
            if self._lead is None or self._lead.ring.broken is not None:
                elsewhere = self._neighbourhood.head_elsewhere()
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
        """End the ring, requests or not, within a few seconds."""
        if self._lead is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._lead.ring.unload()
            self._lead = None

    def ring_broken(self, ring: str, error: ShardnetError) -> None:
        """Take a stage's word that a ring is broken."""
        if self._lead is not None and self._lead.ring.name == ring:
            self._lead.ring.lost(f"the ring broke: {error}")

    async def _find_or_build(
        self,
        choice: ModelChoice,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
    ) -> Lead | Elsewhere:
        standing = self._standing(choice)
        if standing is not None:
            on_plan(standing.plan)
            return standing
        elsewhere = self._neighbourhood.head_elsewhere()
        if elsewhere is not None and elsewhere.model == choice.model and not choice.nodes:
            return elsewhere
        self.check_idle()
        plan = await self.plan(choice)
        if isinstance(plan, Elsewhere):
            return plan
        on_plan(plan)
        return await self._build(plan, on_progress)

    def _standing(self, choice: ModelChoice) -> Lead | None:
        """Return the ring that stands if it is what `choice` asks for, unchanged on disk.

        A client that names no nodes takes any ring with its model; settings it leaves open match,
        but for the wire dtype: without one nothing is rounded.
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
            and settle_wire_dtype(choice.wire_dtype, spec.dtype) is spec.wire_dtype
            and (not choice.threads or choice.threads == spec.threads)
            and spec.stamp == stamp(resolve_model(choice.model))
        )
        return lead if matches else None

    async def _build(self, plan: Plan, on_progress: OnStageProgress) -> Lead:
        """Free the old ring, check that all nodes hold one model, and build the new ring."""
        ports = [await self._neighbourhood.port(node) for node in plan.nodes]
        own, *others = ports
        await check_same_model(
            plan.facts.model_id,
            own.name,
            [(port.name, _identifying(port, plan.choice.model)) for port in others],
        )
        if self._lead is not None:
            await self._lead.ring.unload(keep={node.address for node in plan.nodes})
            self._lead = None
        self._epoch += 1
        ring = Ring(_spec(plan), ports, Epoch(self._epoch))
        load_s = await ring.build(on_progress)
        tokenizer = await self._neighbourhood.load_tokenizer(plan.facts.path)
        self._lead = Lead(
            plan=plan,
            ring=ring,
            tokenizer=tokenizer,
            eos_ids=tokenizer.eos_ids if tokenizer else read_eos_ids(plan.facts.path),
            load_s=0.0,
        )
        return replace(self._lead, load_s=load_s)


def _spec(plan: Plan) -> RingSpec:
    return RingSpec(
        model=plan.choice.model,
        model_id=plan.facts.model_id,
        stamp=plan.facts.stamp,
        addresses=tuple(node.address for node in plan.nodes),
        layers=tuple(stage.layers for stage in plan.placement.stages),
        dtype=plan.dtype,
        wire_dtype=plan.wire_dtype,
        context=plan.context,
        threads=plan.choice.threads,
        vocab_size=plan.facts.config.vocab_size,
    )


def _identifying(port: StagePort, model: str) -> Callable[[], Awaitable[str]]:
    return lambda: port.identify(model)
