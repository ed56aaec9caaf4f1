"""The one ring that this node leads: found for a request, built, unloaded.

Knows whether a request can use the ring, and when another one replaces it. Must not know how plans
are made (planning.py), how clients are answered (clients.py) nor how a stage runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from shardnet import errors
from shardnet.cluster.head.lead import Lead, LedRing, Opening, unless_lost
from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.member.refusals import draining, resting
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers, RedirectedError
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.cluster.ring.ring import OnStageProgress, Ring
from shardnet.transport.loop import at_most
from shardnet.types import Epoch, NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import RingLoad, RingWork
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import DropWarm, RingBroken


def lost_first(told: str, others: Collection[str]) -> str:
    """Return what was told to a head so that it begins with the node at the end of the lost link.

    Each link on which that was passed on has put its sender before it: `cleo (ADDRESS): bert
    (ADDRESS): the connection is closed`. The first sender is named at the end, further ones are
    left out. `others` are the names of the ring's nodes beside the head: a link to the head says
    nothing of who was lost, so its other end stays first.
    """
    teller = ""
    while sender := _sender(told, others):
        _, _, rest = told.partition(": ")
        if not _sender(rest, others):
            break
        teller, told = teller or sender, rest
    return f"{told} (as {teller} says)" if teller else told


def _sender(told: str, names: Collection[str]) -> str:
    """Return whose name and address a text begins with, "" for none of these names."""
    who, colon, _ = told.partition(": ")
    named = [name for name in names if who.startswith(f"{name} (") and who.endswith(")")]
    return max(named, key=len, default="") if colon else ""


CLOSE_S = 3.0
"""How long a head that shuts down waits for its stages to be freed."""
TOLD_S = 5.0
"""How long a head that is refused as a former one waits for its successor to say where it is."""
_NOBODY = (-1, "")
MOST_TRIES = 4
"""How often a ring is built for a request while nodes or links of it are lost."""


@dataclass(kw_only=True, eq=False, repr=False)
class Head:
    """Keeps at most one ring.

    `on_broken` is called when the ring of a lead breaks; it returns whether it will be replaced:
    then its requests wait, else they fail. `log` takes lines for people.
    """

    node: NodeId
    """This node's id."""
    host: StageHost
    planner: Planner
    builder: RingBuilder
    on_broken: Callable[[Lead], bool] = lambda lead: False
    log: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.led = LedRing(
            node=self.node, host=self.host, builder=self.builder, on_broken=self.on_broken
        )
        """The ring itself."""
        self._providing = asyncio.Lock()
        """Held by who downloads a model."""
        self._gave_way = _NOBODY
        self._gives_way = asyncio.Event()
        self.is_draining = False
        """Whether no more requests are taken."""
        self.on_unloaded: Callable[[], None] = lambda: None
        """Called when the ring was freed, as somebody asked."""
        self.rests = ""
        """Why no more requests are taken for the ring that stands, "" while they are."""
        self.until_settled: Callable[[], Awaitable[None]] = _nothing
        """Waits while this node may be about to lead in the place of another."""
        self.model_led_at: Callable[[str], Awaitable[str]] = _no_model
        """Asks the node at an address for the model of the ring that it leads, "" for none."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages that stages send to their head."""
        handlers.register(RingBroken, self._stage_reports_broken)
        handlers.register(DropWarm, self._drop_warm_for)

    async def _stage_reports_broken(self, control: ControlLink, message: RingBroken) -> None:
        cause = errors.error_for_code(message.code, f"{control.peer_name}: {message.message}")
        silent, reporter = NodeId(message.silent), NodeId(control.link.peer.node)
        self.ring_broken(message.ring, cause, silent or None, reporter)

    async def _drop_warm_for(self, control: ControlLink, message: DropWarm) -> None:
        if self.led.lead is not None and self.led.lead.ring.name == message.ring:
            self.drop_warm()
        control.send(Done(request=message.request))

    def drop_warm(self) -> None:
        """Free what the ring keeps in KV caches for requests to come."""
        if self.led.lead is not None and self.led.lead.stands:
            self.led.lead.ring.engine.drop_warm()

    @property
    def model(self) -> str | None:
        """The model of the ring, None without one."""
        return self.led.lead.plan.choice.model if self.led.lead and self.led.lead.stands else None

    @property
    def opening(self) -> Opening | None:
        """What is done now to have a ring for a request."""
        return self.led.opening

    @property
    def latest(self) -> Lead | None:
        """The ring that was built last and not unloaded, broken or not."""
        return self.led.lead

    @property
    def choice(self) -> ModelChoice | None:
        """What the ring that this node is in was opened for, None without one."""
        if self.led.lead is not None and self.led.lead.stands:
            return self.led.lead.plan.choice
        elsewhere = self.led.other_head()
        return None if elsewhere is None else ModelChoice(model=elsewhere.model)

    @property
    def idle_s(self) -> float | None:
        """Seconds since a request used the ring last, 0 while one does, None without a ring."""
        return self.led.lead.ring.idle_s if self.model is not None and self.led.lead else None

    @property
    def n_requests(self) -> int:
        """Requests that wait or run on the ring."""
        return self.led.lead.ring.engine.n_active if self.model is not None and self.led.lead else 0

    @property
    def load(self) -> RingLoad | None:
        """Counters of the ring's engine, None without a ring."""
        if self.led.lead is None or not self.led.lead.stands:
            return None
        return self.led.lead.ring.engine.counters

    @property
    def work(self) -> RingWork | None:
        """What the ring has done so far, None without one."""
        load = self.load
        if load is None or self.led.lead is None:
            return None
        return self.led.lead.ring.work(load)

    @property
    def is_in_use(self) -> bool:
        """Whether requests wait or run on the ring that this node leads."""
        return self.led.is_in_use

    @contextlib.asynccontextmanager
    async def lead(
        self,
        choice: ModelChoice,
        *,
        tokenizer_for: str = "",
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
        on_loaded: Callable[[float], None] = lambda load_s: None,
    ) -> AsyncIterator[Lead | Elsewhere]:
        """Yield a ring for `choice`, built if needed, that is not unloaded within the context.

        `on_loaded` takes the seconds that loading took, if a ring was built.

        A ring that stands is there at once, also while another model is looked for. `tokenizer_for`
        says what needs a tokenizer, "" for nothing: no weights are read or fetched of a model that
        has none. Raises BusyError when another model's requests run, CheckpointError for a model
        without a tokenizer, and what planning or loading raises.
        """
        if self.is_draining and self.successor_address:
            yield Elsewhere(address=self.successor_address, model=choice.model)
            return
        self._check_takes_requests()
        with contextlib.ExitStack() as stack:
            lead: Lead | Elsewhere | None = await self._standing(choice)
            if isinstance(lead, Lead):
                stack.enter_context(lead.ring.in_use())
                kinds = ("", "kv", "auto")
                if kinds.index(choice.standby) > kinds.index(lead.plan.choice.standby):
                    lead.plan, lead.opened = (
                        plan.with_standbys(choice.standby) for plan in (lead.plan, lead.opened)
                    )
                on_plan(lead.plan)
            else:
                await self.until_settled()
                await self._provide(choice, tokenizer_for, on_progress)
                await self.until_settled()  # again: a download takes long
                async with self.led.lock:
                    self._check_takes_requests()
                    with self.led.opened(choice.model, on_progress) as told:
                        lead = await self._find_or_build(
                            choice, tokenizer_for, on_plan, told, on_loaded
                        )
                    if isinstance(lead, Lead):
                        stack.enter_context(lead.ring.in_use())
            yield lead

    async def lead_instead(
        self, make_plan: Callable[[], Awaitable[Plan]], former: NodeId, epoch: Epoch
    ) -> Lead:
        """Build a ring in the place of that of another head, which is lost.

        Its epoch is `epoch` or later. Raises what planning and building raise.
        """
        async with self.led.lock:
            self.led.check_idle()
            self.led.epoch = max(self.led.epoch, epoch - 1)
            plan = await make_plan()
            with self.led.opened(plan.choice.model, lambda *_: None) as told:
                return await self.led.build(
                    plan, "", told, lambda load_s: None, lambda ring: None, instead_of=former
                )

    async def give_way(self, address: str, epoch: int) -> None:
        """Let the node at `address` lead, whose ring has `epoch`: requests are sent there.

        Rings that this node leads after that have later epochs.
        """
        self.led.epoch, lead = max(self.led.epoch, epoch), self.led.lead
        self._gave_way = self.led.epoch, address
        self._gives_way.set()
        self._gives_way = asyncio.Event()
        if lead is None:
            return
        error = errors.SupersededError(f"the node at {address} leads in place of this one")
        error.address = address
        lead.ring.on_broken = lambda ring: False
        lead.ring.give_up(error)
        async with self.led.lock:
            if self.led.lead is lead:
                await self.led.unload({node.address for node in lead.plan.ring_nodes[1:]})

    async def successor(self) -> str:
        """Return the address of the node that leads in place of this one's last ring, "" for none.

        It says so itself as soon as it can: it is waited for.
        """
        epoch = self.led.epoch
        async with at_most(TOLD_S):
            while self._gave_way[0] < epoch:
                await self._gives_way.wait()
        return self._gave_way[1] if self._gave_way[0] >= epoch else ""

    @property
    def successor_address(self) -> str:
        """Where the node is to which this one has given way, "" if it may lead itself."""
        return self._gave_way[1]

    def was_succeeded(self, address: str) -> None:
        """Note that the node at `address` leads in place of this one's process before this."""
        self._gave_way = self.led.epoch, address

    def elsewhere(self) -> Elsewhere | None:
        """Return the head of the ring that this node is in, None if that is itself or no ring."""
        if self.led.lead is not None and self.led.lead.stands:
            return None
        return self.led.other_head()

    def check_leads(self) -> None:
        """Raise RedirectedError if another node is the head of the ring that this node is in."""
        elsewhere = self.elsewhere()
        if elsewhere is not None:
            raise RedirectedError(elsewhere.address)

    async def unload(self, model: str = "", idle_s: float = 0.0) -> Elsewhere | None:
        """End the ring and free it on every node, or name the head of the ring this node is in.

        Does nothing if the ring has another model than `model`, "" for any. Raises BusyError while
        requests run, if one ended less than `idle_s` seconds ago, and while a model is being loaded
        for one.
        """
        if self.led.building is not None:
            raise errors.BusyError(
                f"this node is loading {self.led.building.spec.form.model}",
                remedy="stop the command that asked for it, or wait until that ends",
            )
        async with self.led.lock:
            elsewhere = self.elsewhere()
            if elsewhere is not None:
                return elsewhere if model in ("", elsewhere.model) else None
            if self.led.lead is None:
                await self.host.unload(self.node)
                return None
            if model not in ("", self.led.lead.plan.choice.model):
                return None
            self.led.check_idle()
            _check_unused(self.led.lead.ring, idle_s)
            await self.led.unload()
            self.on_unloaded()
            return None

    async def close(self) -> None:
        """End the ring within CLOSE_S, even if requests run.

        A ring that is being built is freed by its builder, once the client has gone.
        """
        async with at_most(CLOSE_S), self.led.lock:
            if self.led.lead is not None:
                await self.led.lead.ring.unload()
        await self.led.forget()

    def ring_broken(
        self,
        ring: str,
        error: errors.ShardnetError,
        silent: NodeId | None = None,
        reporter: NodeId | None = None,
    ) -> None:
        """End `ring`, built or being built, since one of its stages reported it broken.

        `silent` is the node of which the `reporter`, None for this node, heard nothing any more, or
        nothing right.
        """
        for ours in (self.led.building, self.led.lead.ring if self.led.lead is not None else None):
            if ours is not None and ours.name == ring:
                if isinstance(error, errors.LocalProtocolError):  # it would have sent what is wrong
                    silent = reporter
                if silent is not None and ours.broken is None:
                    ours.fell_silent(reporter or self.node, silent, error)
                ours.lost(f"the ring broke: {lost_first(str(error), ours.other_names)}")

    def _check_takes_requests(self) -> None:
        """Raise what a request is refused with while this node drains or rests."""
        if self.is_draining and self.led.other_head() is None:
            raise draining()
        if self.rests and self.model is not None:
            raise resting(self.rests)

    async def _provide(
        self, choice: ModelChoice, tokenizer_for: str, on_progress: OnStageProgress
    ) -> None:
        """Download the model of `choice` if no node has it, one model at a time.

        That may take hours, in which the ring that stands is recovered or left: it is not kept from
        changing. Raises BusyError when another model's requests run, and as `Planner.provide`.
        """
        if self.led.elsewhere_with(choice) or await self.planner.is_provided(choice.model):
            return  # it need not wait for the download of another one
        async with self._providing:
            if await self._standing(choice) or self.led.elsewhere_with(choice):
                return
            self.led.check_idle()
            with self.led.opened(choice.model, on_progress) as told:
                await self.planner.provide(
                    choice.model,
                    lambda done, total: told(0, "downloading", done, total),
                    tokenizer_for,
                )

    async def _find_or_build(
        self,
        choice: ModelChoice,
        tokenizer_for: str,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
        on_loaded: Callable[[float], None],
    ) -> Lead | Elsewhere:
        standing = await self._standing(choice)
        if standing is not None:
            on_plan(standing.plan)
            return standing
        elsewhere = self.led.elsewhere_with(choice) or await self._successor_with(choice)
        if elsewhere is not None:
            return elsewhere
        self.led.check_idle()
        planning = self.planner.plan_awake(
            choice,
            lambda done, total: on_progress(0, "measuring", done, total),
            on_plan,
            on_progress,
            divides=False,  # several are the router's
        )
        try:
            plan = await self._unless_recovering(planning)
        except errors.PeerFailedError:
            self.led.check_idle()  # its requests have the lock from now on
            raise
        except errors.LinkError:  # a node that is named is away
            if (elsewhere := self._instead(choice)) is None:
                raise
            return elsewhere
        if isinstance(plan, Elsewhere):
            return plan
        try:
            return await self._build_some(plan, tokenizer_for, on_plan, on_progress, on_loaded)
        except errors.SupersededError as error:
            if not error.address:
                raise
            return Elsewhere(address=error.address, model=choice.model)
        except errors.BusyError:
            if (elsewhere := self._instead(choice)) is None:
                raise
            return elsewhere

    async def _successor_with(self, choice: ModelChoice) -> Elsewhere | None:
        """Return the node that leads in place of this one, which has given way to one, if a choice
        names it and its ring has the model.

        It may be the successor of the successor, and its ring without this node as yet, whose
        process may be another one than before.
        """
        elsewhere, others = self.led.other_head(), choice.nodes[1:]
        if not self.successor_address or not others:
            return None
        if elsewhere is None:
            models = await asyncio.gather(*map(self.model_led_at, others))
            led = [at for at, model in zip(others, models, strict=True) if model == choice.model]
            return Elsewhere(address=led[0], model=choice.model) if led else None
        is_named = elsewhere.address in others
        return elsewhere if is_named and elsewhere.model == choice.model else None

    def _instead(self, choice: ModelChoice) -> Elsewhere | None:
        """Return the head whose ring may be in the place of the one that a choice names."""
        elsewhere = self.led.other_head()
        if elsewhere is not None and elsewhere.model == choice.model:
            return elsewhere
        address = self.successor_address  # whose requests still run
        return Elsewhere(address=address, model=choice.model) if address else None

    async def _unless_recovering(
        self, work: Coroutine[Any, Any, Plan | Elsewhere]
    ) -> Plan | Elsewhere:
        """Do work unless the ring that stands is used meanwhile, and lost: see `unless_lost`."""
        lead = self.led.lead
        if lead is None or lead.ring.broken is not None:
            return await work
        return await unless_lost(lead.ring, work, lambda: lead.ring.is_in_use)

    async def _build_some(
        self,
        opened: Plan,
        tokenizer_for: str,
        on_plan: Callable[[Plan], None],
        on_progress: OnStageProgress,
        on_loaded: Callable[[float], None],
    ) -> Lead:
        """Build the ring of a plan, or one without the nodes that are lost while it is built.

        Raises as `_build`; what was lost too, if the nodes that are left cannot do it.
        SupersededError has an address: that node leads in place of this one.
        """
        plan, avoided, refusing = opened, dict[NodeId, errors.ShardnetError](), dict[NodeId, str]()
        for n_left in reversed(range(MOST_TRIES)):
            on_plan(plan)
            tried: list[Ring] = []
            try:
                lead = await self.led.build(
                    plan, tokenizer_for, on_progress, on_loaded, tried.append
                )
            except (errors.LinkError, errors.PeerFailedError) as error:
                if isinstance(error, errors.SupersededError):
                    error.address = await self.successor()
                    if error.address:
                        raise
                for ring in tried:
                    avoided |= ring.unreached
                    refusing |= {node: why.message for node, why in ring.blamed.items()}
                if not n_left or self.node in refusing:
                    raise
                without = {node: why.message for node, why in avoided.items()} | refusing
                try:
                    plan = await self.planner.replan(opened, plan, without)
                except errors.PlanError:
                    raise error from None
                names = ", ".join(node.name for node in plan.nodes)
                self.log(f"no ring yet: {error}; now over {names}")
            else:
                lead.opened, lead.avoided = opened, avoided
                self._gave_way = _NOBODY
                return lead
        raise AssertionError("the last try returns or raises")

    async def _standing(self, choice: ModelChoice) -> Lead | None:
        """Return the ring if it is what `choice` asks for and its checkpoint is unchanged."""
        lead = self.led.lead
        if lead is None or not lead.stands or not lead.suits(choice):
            return None
        if await self.planner.has_changed(lead.plan.facts, choice.model):
            return None
        return lead if self.led.lead is lead and lead.stands else None


async def _nothing() -> None:
    """Wait for nothing."""


async def _no_model(address: str) -> str:
    """Know of no ring."""
    return ""


def _check_unused(ring: Ring, idle_s: float) -> None:
    """Raise BusyError if a request has used a ring less than `idle_s` seconds ago."""
    if idle_s and ring.broken is None and ring.idle_s < idle_s:
        raise errors.BusyError(
            f"{ring.spec.form.model} was used {ring.idle_s:.0f} s ago, and is freed after "
            f"{idle_s:g} s",
            remedy="ask again later",
        )
