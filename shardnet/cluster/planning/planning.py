"""From what a client asks for to a plan, step by step.

    find_candidates → identify → measure → make_plan  here
    → build the ring (head/ring_builder.py) → run the request (head/clients.py)

Candidates come before the model, since the node that would be head is the one to look for it.
Knows the order of the steps and whom they ask. Must not load anything or start a ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from msgspec import structs

from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.hub import pull_beside
from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, Measured, OnMeasured, StageRun
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.sleepers import Sleepers
from shardnet.cluster.planning.placing import (
    is_worth_waking,
    make_plan,
    plan_again,
    unmeasured,
    unneeded,
    weighed_plan,
)
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.ring_dtypes import node_ariths, settle_arith, settle_dtype
from shardnet.cluster.planning.what_if import parse_machine, with_estimates
from shardnet.cluster.ring.ring import OnStageProgress
from shardnet.cluster.sharing.adapter_sharing import adapter_facts
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, CheckpointError, DiskSilentError, PlanError, ShardnetError
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.types import Arith, DType, NodeId
from shardnet.wire.messages.deputies import StandBy
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import LeftOut, ModelChoice

REPLAN_STATUS_S = 2.0
"""How long a node may take to tell its state while requests wait for another ring."""
KNOWN_S = 1.0
"""How long a deputy waits for figures of nodes, which have most of them from the plan before."""
CHECK_S = 0.5
"""How long a ring that stands waits to learn that its checkpoint has not changed."""


MOST_NAMED = 8
"""Nodes that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Another node is or would be the head of a ring with `model`: the client should ask there."""

    address: str
    model: str


@dataclass(kw_only=True, eq=False, repr=False)
class Planner:
    """Plans for clients of `node`. `threads` compute plans: a strange model's takes seconds.

    Nodes that are asleep are `sleepers`.
    """

    node: NodeId
    directory: NodeDirectory
    sleepers: Sleepers
    sharing: Sharing
    measuring: MeasurementService
    threads: DiskJobs
    log: Callable[[str], None]

    async def plan(
        self,
        choice: ModelChoice,
        on_measured: OnMeasured,
        *,
        measure_one: bool = False,
        again: bool = False,
        without: Collection[str] = (),
        divides: bool = True,
        added: Sequence[str] = (),
    ) -> Plan | Elsewhere:
        """Plan `choice` without the nodes `without`, or name the node that would be its head.

        With machines that are `added`, as what_if.py reads them, any node may be the head: the plan
        is only looked at. One with nodes that are `asleep` is for when they wake (`plan_awake`).
        With `again` known figures are measured too; a node alone is measured with `measure_one`
        only. `on_measured` is called after each node and link, `divides` as in `make_plan`. Raises
        PlanError, CheckpointError, UsageError or LinkError if there can be no plan.
        """
        machines = [parse_machine(text) for text in added]
        awake, silent = await self.find_candidates(choice, without)
        if choice.nodes and awake[0].node != self.node and awake[0].asleep is None:
            return Elsewhere(address=awake[0].address, model=choice.model)
        facts = await self.identify(choice)
        infos = [machine.info(number, awake) for number, machine in enumerate(machines)]
        known = () if choice.nodes else self.sleepers.infos()
        asleep = [info for info in known if info.node not in without]

        async def over(there: Sequence[NodeInfo], silent: Sequence[LeftOut]) -> Plan:
            nodes = [*there, *infos]
            dtype = settle_dtype(choice.dtype, facts.config, nodes)

            async def placed(arith: Arith) -> Plan:
                ariths = node_ariths(choice.arith, arith, there)
                here = [info for info in there if info.asleep is None]
                holdings = await self.sharing.holdings(facts, choice.model, here)
                if len(there) > 1 or measure_one or asleep:
                    measured = await self.measuring.measured(
                        there, choice, facts, dtype, ariths, again=again, on_measured=on_measured
                    )
                else:
                    measured = await self.measuring.known(there[0], choice, facts, dtype, ariths)
                if machines:
                    sizes = unmeasured(facts, nodes, choice, arith)
                    measured = with_estimates(measured, there, machines, infos, facts.config, sizes)
                make = weighed_plan if measure_one and not machines else make_plan
                job = partial(
                    make, choice, facts, nodes, measured, silent, holdings, arith, divides
                )
                return await self.threads.run(f"planning {choice.model}", job)

            return await _settled(choice.arith, settle_arith(choice.arith, nodes), placed)

        silent = [*silent, *self.sleepers.left_out()]
        plan: Plan | PlanError
        try:
            plan = await over(awake, [*silent, *map(unneeded, asleep)])
        except PlanError as error:
            plan = error
        if asleep:
            with contextlib.suppress(PlanError):
                wider = await over([*awake, *asleep], silent)
                plan = wider if is_worth_waking(plan, wider) else plan
        if isinstance(plan, PlanError):
            raise plan
        if plan.nodes[0].node != self.node and not (added or plan.asleep):
            return Elsewhere(address=plan.nodes[0].address, model=choice.model)
        return plan

    async def plan_awake(
        self,
        choice: ModelChoice,
        on_measured: OnMeasured,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
        *,
        divides: bool = True,
    ) -> Plan | Elsewhere:
        """Plan as `plan`, and wake the nodes that the plan needs, or plan without them.

        `on_plan` takes a plan with nodes that are asleep, before they are woken. Raises as `plan`.
        """
        while True:
            plan = await self.plan(choice, on_measured, divides=divides)
            if isinstance(plan, Elsewhere) or not plan.asleep:
                return plan
            on_plan(plan)
            tell = partial(_tell_waking, plan, on_progress)
            await self.sleepers.wake([info.node for info in plan.asleep], tell)

    async def replan(
        self, opened: Plan, now: Plan, without: Mapping[NodeId, str], *, measures: bool = False
    ) -> Plan:
        """Plan again what `opened` was planned for, led by this node.

        `now` is the plan of the ring to replace, whose dtype and arithmetic are kept, and its
        figures too unless the nodes are to be measured. Of nodes that the client named those are
        used that are there. Nodes in `without` are left out for the reason given. Those of the ring
        that drain or rest by now are used where it takes them; where the others cannot do it, those
        that sleep are woken. Raises PlanError if the nodes that are there cannot do it.
        """
        try:
            return await self._replan(opened, now, without, measures)
        except PlanError:
            asleep = [] if opened.choice.nodes else [info.node for info in self.sleepers.infos()]
            if not asleep:
                raise
            await self.sleepers.wake(asleep)
            return await self._replan(opened, now, without, measures)

    async def _replan(
        self, opened: Plan, now: Plan, without: Mapping[NodeId, str], measures: bool
    ) -> Plan:
        """Plan again over the nodes that are there; see replan."""
        found = await self.directory.candidates((), REPLAN_STATUS_S, leads=True)
        nodes = tuple(info for info in found.nodes if info.node not in without)
        members = {node.node for node in now.nodes} - without.keys()
        leaving = tuple(info for info in found.away if info.node in members)
        try:
            plan = await self._plan_over(nodes, opened, now, without, found.silent, measures)
        except PlanError:
            if not leaving:
                raise
            there = (*nodes, *leaving)
            plan = await self._plan_over(there, opened, now, without, found.silent, measures)
        return plan.instead_of(opened, now, without)

    async def _plan_over(
        self,
        nodes: tuple[NodeInfo, ...],
        opened: Plan,
        now: Plan,
        without: Collection[str],
        silent: Sequence[LeftOut],
        measures: bool,
    ) -> Plan:
        """Plan again over `nodes`; see replan."""
        choice, facts = opened.choice, opened.facts
        if choice.nodes:
            named = {**_named_nodes(opened, nodes)}
            if measures:
                named |= await self._called_at([a for a in choice.nodes if a not in named], without)
            nodes = _all_or_some(opened, named)
        asked = structs.replace(choice, dtype=now.dtype.value, context=now.context)
        measured = now.measured
        if measures:
            ariths = node_ariths(choice.arith, now.arith, nodes)
            measured = await self.measuring.measured(nodes, choice, facts, now.dtype, ariths)
        return await self._again(asked, facts, nodes, measured, silent, now.arith)

    async def _again(
        self,
        asked: ModelChoice,
        facts: ModelFacts,
        nodes: Sequence[NodeInfo],
        measured: Measured,
        silent: Sequence[LeftOut],
        arith: Arith,
    ) -> Plan:
        holdings = await self.sharing.holdings(facts, asked.model, nodes)
        job = partial(plan_again, asked, facts, nodes, measured, silent, holdings, arith)
        return await self.threads.run(f"planning {asked.model}", job)

    async def prepare_instead(self, told: StandBy) -> None:
        """Fetch what `plan_instead` will need and only the head has: its adapters' parts.

        Raises PeerFailedError if it does not send them.
        """
        await self.sharing.adapters.have(told.adapters, [told.nodes[0].address])

    async def plan_instead(self, told: StandBy, without: Mapping[NodeId, str]) -> Plan:
        """Plan what a head that is lost has led, for a ring that this node leads.

        `told` is what the head said of its plan. Nodes in `without` are left out. Layers that were
        given with it had a range for the head, and are divided anew. Nodes that were named and are
        not there stay named, behind the others: they are used when they are back. Raises PlanError
        if the nodes that are there cannot do it.
        """
        choice = structs.replace(told.choice, layers=[])
        facts = await self.look_up(choice.model)
        if told.adapters:
            facts = facts.with_adapters([adapter_facts(each) for each in told.adapters])
        facts = await self._with_tower(facts, choice.mmproj)
        found = await self.directory.candidates((), REPLAN_STATUS_S, leads=True)
        nodes = tuple(info for info in found.nodes if info.node not in without)
        if choice.nodes:
            places = {place.node: place.address for place in told.nodes}
            nodes = tuple(
                structs.replace(info, address=places[info.node])
                for info in nodes
                if info.node in places
            )
        asked = structs.replace(choice, dtype=told.dtype, context=told.context)
        dtype, arith = DType.named(told.dtype), Arith(told.arith)
        measured = NOTHING_MEASURED
        with contextlib.suppress(ShardnetError, TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                ariths = node_ariths(choice.arith, arith, nodes)
                measured = await self.measuring.measured(nodes, choice, facts, dtype, ariths)
        plan = await self._again(asked, facts, nodes, measured, found.silent, arith)
        ring = [node.address for node in plan.ring_nodes] if choice.nodes else []
        away = [place.address for place in told.nodes if place.address not in ring]
        named = [*ring, *away] if choice.nodes else []
        return replace(plan, choice=structs.replace(choice, nodes=named))

    async def _called_at(
        self, addresses: Sequence[str], without: Collection[str]
    ) -> dict[str, NodeInfo]:
        """Find the nodes at addresses: one that was started again has another id."""
        found: dict[str, NodeInfo] = {}
        for address in addresses:
            with contextlib.suppress(ShardnetError, TimeoutError):
                async with asyncio.timeout(REPLAN_STATUS_S):
                    [info] = (await self.directory.candidates([address])).nodes
                    if info.node not in without and info.asleep is None:
                        found[address] = info
        return found

    async def find_candidates(
        self, choice: ModelChoice, without: Collection[str] = ()
    ) -> tuple[Sequence[NodeInfo], Sequence[LeftOut]]:
        """Find the nodes that `choice` names, without names this node and all its peers.

        Returns those that may do it, the one asked to be head first, and those that were silent.
        Raises PlanError when none is left without `without`, and what NodeDirectory.candidates
        raises.
        """
        found = await self.directory.candidates(choice.nodes)
        nodes = [info for info in found.nodes if info.node not in without]
        if not nodes:
            why = ", ".join(f"{one.name} ({one.why})" for one in found.silent[:MOST_NAMED])
            raise PlanError(f"no node is left to plan for: {why or 'all are to be left out'}")
        return nodes, found.silent

    async def identify(self, choice: ModelChoice) -> ModelFacts:
        """Identify the model on this node or else on a peer.

        Raises CheckpointError if no node has it, or an adapter is not on this one, and
        UnsupportedModelError for unknown keys of its config that the choice does not ignore, and
        for what of an adapter is not implemented.
        """
        facts = await self.look_up(choice.model)
        if not choice.ignore_unknown_config:
            facts.check_known()
        if choice.adapters:
            facts = facts.with_adapters(await self.sharing.adapters.identify(choice, facts))
        return await self._with_tower(facts, choice.mmproj)

    async def learn(self, plan: Plan, runs: Sequence[StageRun]) -> None:
        """Tell the nodes of a plan what a generation has disproved, for the plans that follow."""
        ariths = node_ariths(plan.choice.arith, plan.arith, plan.nodes)
        await self.measuring.observed(plan.nodes, plan.choice, plan.facts, plan.dtype, ariths, runs)

    async def _with_tower(self, facts: ModelFacts, mmproj: str) -> ModelFacts:
        if not mmproj:
            return facts
        path = Path(mmproj)
        return await self.sharing.disk.run(path, partial(facts.with_tower, path))

    async def look_up(self, model: str) -> ModelFacts:
        """Read the facts of `model`, a path or name, here or else from a peer.

        Raises CheckpointError if no node has it.
        """
        return await self.sharing.identify(model)

    async def has_changed(self, facts: ModelFacts, model: str) -> bool:
        """Say whether `model` means another checkpoint than that of `facts` by now.

        A disk that does not answer at once has changed nothing: who has the model in memory needs
        no disk. Raises CheckpointError if no node has the model any more.
        """
        try:
            async with asyncio.timeout(CHECK_S):
                if facts.adapters and await self.sharing.adapters.have_changed(facts.adapters):
                    return True
                if await self.sharing.is_unchanged(facts, model):
                    return False
            now = await self.look_up(model)
        except (TimeoutError, DiskSilentError, BusyError):
            return False
        return (now.model_id, now.stamp) != (facts.model_id, facts.stamp)

    async def provide(
        self, model: str, on_progress: Callable[[int, int], None], tokenizer_for: str = ""
    ) -> None:
        """Download a model of the Hub that neither this node nor a peer has.

        `on_progress` takes (bytes done, bytes in all). `tokenizer_for` as in hub.pull.
        """
        name = HubName.parse(model)
        if name is not None and not await self.is_provided(model):
            await pull_beside(name, on_progress, self.log, tokenizer_for)

    async def is_provided(self, model: str) -> bool:
        """Say whether a model need not be downloaded: it is here, at a peer, or not of the Hub."""
        if HubName.parse(model) is None or await self.sharing.is_here(model):
            return True
        try:
            await self.look_up(model)
        except DiskSilentError:
            raise
        except CheckpointError:
            return False
        return True


def _tell_waking(
    plan: Plan, on_progress: OnStageProgress, node: str, waited_s: float, rule_s: float
) -> None:
    """Tell for how long a node of a plan has been waited for, and how long that takes, in s."""
    rank = next((rank for rank, info in enumerate(plan.nodes) if info.node == node), 0)
    on_progress(rank, "waiting", int(waited_s), math.ceil(rule_s))


def _named_nodes(opened: Plan, nodes: Sequence[NodeInfo]) -> dict[str, NodeInfo]:
    """Return the nodes that the client named which are there, by the addresses it named.

    Those that were not there when `opened` was planned are the last ones named.
    """
    by_id = {info.node: info for info in nodes}
    by_address = {info.address: info for info in nodes}
    ids = [node.node for node in opened.ring_nodes]
    return {
        address: structs.replace(found, address=address)
        for address, node in zip_longest(opened.choice.nodes, ids)
        if (found := by_id.get(node) or by_address.get(address)) is not None
    }


def _all_or_some(opened: Plan, named: Mapping[str, NodeInfo]) -> tuple[NodeInfo, ...]:
    """Return the named nodes that are there, in the order in which they were named.

    Raises PlanError if layers were named with them, and one is missing.
    """
    at = zip(opened.choice.nodes, opened.ring_nodes, strict=False)
    lost = [node.name for address, node in at if address not in named]
    if lost and opened.choice.layers:
        raise PlanError(
            f"--nodes and --layers fix the ring, and {', '.join(lost)} is not there any more",
            remedy="start it again, or leave --layers out",
        )
    return tuple(named[address] for address in opened.choice.nodes if address in named)


async def _settled(
    requested: str, arith: Arith, placed: Callable[[Arith], Awaitable[Plan]]
) -> Plan:
    """Return a plan of which the nodes settle on the arithmetic that it is made with.

    `arith` is what all candidates settle on, unlike ones on portable arithmetic. Of those a ring
    may leave out the unlike ones: then the others compute as fast as they can, and in less memory.
    Raises PlanError if there is none.
    """
    if requested != "auto" or arith is Arith.FAST:
        return await placed(arith)
    portable: Plan | PlanError
    try:
        portable = await placed(arith)
    except PlanError as error:
        portable = error
    if isinstance(portable, PlanError) or settle_arith(requested, portable.members) is Arith.FAST:
        with contextlib.suppress(PlanError):
            fast = await placed(Arith.FAST)
            if settle_arith(requested, fast.members) is Arith.FAST:
                return fast
    if isinstance(portable, PlanError):
        raise portable
    return portable
