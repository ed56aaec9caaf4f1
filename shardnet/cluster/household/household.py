"""Leads a household: has the models loaded that are asked for, each on runners of the nodes.

Knows which models there are, where each has its ring, and who makes room for whom. Must not know
how a ring is planned or built: the runners of one model are a cluster of their own, which does so
within the memory that they are given here. Nor who leads: leadership.py decides.

Another node that is asked for one of the models sends its clients to the leader, or to the ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.household.allotment import (
    Loaded,
    is_better_alone,
    is_here,
    made_up,
    needed,
    takes_part,
    victim,
)
from shardnet.cluster.household.leadership import Leader, Leadership
from shardnet.cluster.household.runner_orders import KeptModel, RunnerOrders
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers, RedirectedError
from shardnet.cluster.peers.peer_links import PeerLinks
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.errors import (
    BusyError,
    CapacityError,
    LinkError,
    PeerFailedError,
    PlanError,
    ShardnetError,
    UsageError,
)
from shardnet.transport.link import Link
from shardnet.transport.loop import cancel_all, unheard
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.generation import Unload
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.household import (
    MAX_HOUSEHOLD,
    HouseholdLed,
    HouseholdListed,
    HouseholdModelState,
    LedModel,
    ListHousehold,
    MakeRoom,
    NameModels,
    RunnerShare,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice, PlanReply

LOOK_S: Final = 0.5
"""Interval of the looks at rings and nodes."""
FIRST_S: Final = 1.0
"""How long a new leader waits for nodes to be found, and for one that leads already."""
LATELY_S: Final = 2.0
"""A model that was asked for less than so long ago is not unloaded: its request may be on its way.
"""
AGAIN_S: Final = 10.0
"""After so long a model that is to stay loaded and could not be is tried again."""
LOST_S: Final = 5.0
"""How long a ring that is lost may take to come back by itself, with its requests, before another
one is built."""
GIVEN_BACK_S: Final = 60.0
"""After so long the memory of a ring that has not come back is for others."""
FREE_SHARE: Final = 0.99
"""What is divided of the memory that a node has free: other programs take some meanwhile."""
MOST_WAIT_S: Final = 240.0
"""How long an encoder waits for memory that others use."""
MOST_TRIES: Final = 3
"""How often a ring is planned and built for a model while nodes are lost."""
_NO_ROOM: Final = (PlanError, CapacityError)

Tell = Callable[[str], None]
"""Takes what a request for a model waits for, in words."""


@dataclass(kw_only=True, eq=False, repr=False)
class Household:
    """The models that this node leads, and those of which it knows who does.

    `nodes` describes this `node` and its peers, `reach` gives the control link to one of them, this
    one too; `dial` opens a link to an address, `node_address` gives that of a node. `is_encoder`
    says whether a model has no ring, `named` takes which models there are.
    """

    node: NodeId
    nodes: Callable[[], Awaitable[Sequence[NodeInfo]]]
    reach: Callable[[NodeId], Awaitable[ControlLink]]
    dial: Callable[[str], Awaitable[Link]]
    node_address: Callable[[NodeId], str]
    links: PeerLinks
    is_encoder: Callable[[str], Awaitable[bool]]
    named: Callable[[Collection[str]], Coroutine[None, None, None]]
    tasks: asyncio.TaskGroup
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._kept: dict[str, KeptModel] = {}
        self._given: dict[str, KeptModel] = {}
        """What is being handed over to another leader."""
        self._leads_s = -FIRST_S
        """Since when this node leads."""
        self._changing = asyncio.Lock()
        """Held by who gives memory to runners, or takes it."""
        self._jobs = SupervisedJobs(self.tasks, self.log)
        self._orders = RunnerOrders(reach=self.reach, dial=self.dial, jobs=self._jobs, log=self.log)
        self._leadership = Leadership(
            node=self.node,
            links=self.links,
            own=self._own,
            lead=self._take_over,
            give_up=self._give_up,
            named=self._named,
            log=self.log,
            clock=self.clock,
        )

    def register(self, handlers: MessageHandlers) -> None:
        """Register what is asked about the household, and what its leader says."""
        handlers.register(NameModels, self._name_models)
        handlers.register(ListHousehold, self._list)
        handlers.register(HouseholdLed, self._leadership.take)
        handlers.register(MakeRoom, self._make_room)

    async def close(self) -> None:
        """End what runs. Rings stay: their runners go on."""
        loading = [kept.loading for kept in self._kept.values() if kept.loading is not None]
        await cancel_all(*loading)
        await self._jobs.close()
        await self._orders.close()

    # --- for the node

    def has(self, model: str) -> bool:
        """Say whether a model of a household is called so that has a ring."""
        known = model in self._kept or model in self._led or model in self._given
        return known and not self.encoder(model)

    def names(self) -> list[str]:
        """List what models of the household are called, the most important first."""
        return [*(kept.model.name for kept in self._ordered()), *self._led]

    def choice(self, model: str) -> ModelChoice:
        """Return what a model is that this node leads."""
        return self._kept[model].model.choice

    def check_leads(self) -> None:
        """Raise RedirectedError if another node leads."""
        if self._leadership.other is not None:
            raise RedirectedError(self.leader())

    def leader(self) -> str:
        """Return where the node is that leads other models than this one. Raises LinkError."""
        return self.node_address(NodeId(self._leadership.link.link.peer.node))

    def encoder(self, model: str) -> str:
        """Return the encoder that is called so in a household, "" if none is."""
        if (kept := self._kept.get(model)) is not None:
            return kept.model.choice.model if kept.is_encoder else ""
        return self._led[model].encoder if model in self._led else ""

    async def address_of(self, model: str, tell: Tell) -> str:
        """Return where a model is asked for: at its ring, or at who leads the household.

        Waits until it has a ring. `tell` takes what for, again and again. Raises what kept it from
        having one, UsageError if it is dropped meanwhile.
        """
        while self.has(model):
            if (kept := self._kept.get(model)) is not None:
                if address := await self._loaded(kept, tell):
                    return address
            elif model in self._led and (address := self._led[model].address):
                return address
            elif model in self._led and not self._leadership.is_gone:
                return self.leader()
            else:
                tell(f"{model} waits for another node to lead the household")
                await asyncio.sleep(LOOK_S)
        raise UsageError(f"the household has no {model}")

    async def unload(self, model: str, idle_s: float) -> None:
        """Unload a model that this node leads.

        Raises BusyError if a request uses it, or has asked for it within `idle_s`.
        """
        async with self._changing:
            kept = self._kept[model]
            if kept.n_waiting or not await self._unload(kept, idle_s):
                raise BusyError(f"requests to {model} run", remedy="ask again when they are done")

    async def make_room(self, model: str, free_bytes: int) -> bool:
        """Have models unloaded until this node has so much for an encoder; say whether it may have.

        Waits while they are in use. Raises CapacityError where they are not to go, BusyError after
        MOST_WAIT_S.
        """
        if not self.encoder(model):
            return False
        last_s = self.clock() + MOST_WAIT_S
        while True:
            try:
                if model in self._kept:
                    await self._free_on(self.node, model, free_bytes)
                else:
                    message = MakeRoom(request=0, model=model, free_bytes=free_bytes)
                    await self._leadership.link.ask(message, Done)
            except (BusyError, LinkError):
                if self.clock() > last_s:
                    raise
                await asyncio.sleep(LOOK_S)
            else:
                return True

    async def run(self) -> None:
        """Look after rings and nodes, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._leadership.look()
            if self._kept:
                await self._look()

    # --- messages

    async def _name_models(self, control: ControlLink, message: NameModels) -> None:
        """Take models into the household, or out of it. Raises UsageError for too many."""
        self.check_leads()
        if len({*self._kept, *(model.name for model in message.models)}) > MAX_HOUSEHOLD:
            raise UsageError(f"a household has at most {MAX_HOUSEHOLD} models")
        async with self._changing:
            self.check_leads()  # it may have been handed over meanwhile
            if not self._kept:
                self._leads_s = self.clock()
            changed = [
                model.name
                for model in message.models
                if (known := self._kept.get(model.name)) and known.model.choice != model.choice
            ]
            for name in {*message.dropped, *changed} & self._kept.keys():
                await self._unload(self._kept[name], None)
                del self._kept[name]
            tried_s = self.clock() - AGAIN_S + FIRST_S
            for model in message.models:
                kept = self._kept.setdefault(model.name, KeptModel(model=model, tried_s=tried_s))
                kept.model = model
                kept.looked_at.clear()  # another leader may have loaded it
                kept.is_encoder = await self.is_encoder(model.choice.model)
                if kept.is_encoder:
                    kept.why = "an encoder is loaded when it is asked for"
        self._leadership.look()
        control.send(Done(request=message.request))

    async def _list(self, control: ControlLink, message: ListHousehold) -> None:
        self.check_leads()
        models = [self._state(kept) for kept in self._ordered()]
        control.send(HouseholdListed(request=message.request, models=models))

    def _state(self, kept: KeptModel) -> HouseholdModelState:
        layers = {}
        if kept.plan is not None:
            layers = {NodeId(stage.node): stage.layers for stage in kept.plan.stages}
        shares = [
            RunnerShare(
                name=share.name, memory_bytes=share.memory_bytes, layers=layers.get(share.node)
            )
            for share in kept.shares.values()
            if share.memory_bytes
        ]
        return HouseholdModelState(
            model=kept.model,
            state=kept.state,
            why=explanation(kept.why),
            shares=shares,
            n_requests=kept.n_requests,
            n_waiting=kept.n_waiting,
            predicted_tok_s=kept.plan.predicted_tok_s if kept.plan is not None else None,
            idle_s=max(0.0, self.clock() - kept.asked_s) if kept.asked_s else 0.0,
        )

    # --- who leads

    @property
    def _led(self) -> dict[str, LedModel]:
        """The models of another leader, by their names."""
        other = self._leadership.other
        return {} if other is None else {one.model.name: one for one in other.told.models}

    def _own(self) -> list[LedModel]:
        return [
            LedModel(model=kept.model, address=kept.address, encoder=self.encoder(kept.model.name))
            for kept in self._ordered()
        ]

    def _take_over(self, models: Sequence[LedModel]) -> None:
        """Lead models whose leader is gone. Their rings are found by asking nodes for runners."""
        for one in models:
            kept = self._kept[one.model.name] = KeptModel(model=one.model, tried_s=self.clock())
            kept.is_encoder, kept.asked_s = bool(one.encoder), self.clock()

    def _give_up(self, leader: Leader) -> None:
        """Have another leader have the models, and unload what it has rings of itself."""
        known = {one.model.name: one.address for one in leader.told.models}
        self._given, self._kept = self._kept, {}

        async def give() -> None:
            try:
                async with self._changing:
                    for name, kept in self._given.items():
                        if kept.address and known.get(name) not in (None, "", kept.address):
                            await self._unload(kept, None, f"is led by {leader.name}")
                models = [kept.model for kept in self._given.values()]
                await self._leadership.link.ask(NameModels(request=0, models=models), Done)
            finally:
                self._given = {}

        self._jobs.begin(give, "handing the household over")

    def _named(self, models: Sequence[LedModel]) -> None:
        names = {one.model.name for one in models}
        self._jobs.begin(lambda: self.named(names), "ending runners")

    def _ordered(self) -> list[KeptModel]:
        """List the models, the most important first."""
        return sorted(self._kept.values(), key=lambda kept: -kept.model.priority)

    # --- loading

    async def _loaded(self, kept: KeptModel, tell: Tell) -> str:
        """Return the address of a model's ring, once it has one, "" if another node leads by then.

        Raises what building raises.
        """
        kept.asked_s = self.clock()
        kept.n_waiting += 1
        try:
            while not await self._leads(kept):
                if self._kept.get(kept.model.name) is not kept:
                    return ""
                async with self._told_while(kept, tell):
                    if not self._may_come_back(kept):
                        await asyncio.shield(self._loading(kept))  # others wait for it too
                    if not kept.address:  # there was no room
                        await asyncio.sleep(LOOK_S)
            return kept.address
        finally:
            kept.n_waiting -= 1
            kept.asked_s = self.clock()

    def _loading(self, kept: KeptModel) -> asyncio.Task[None]:
        """Return what has a model loaded, when memory may be divided anew."""

        async def load() -> None:
            await asyncio.sleep(self._leads_s + FIRST_S - self.clock())
            async with self._changing:
                if self._kept.get(kept.model.name) is not kept:
                    return
                await self._find_runners(kept, await self.nodes())
                if not await self._leads(kept):
                    await self._load(kept)

        if kept.loading is None or kept.loading.done():
            kept.loading = asyncio.create_task(load())
            kept.loading.add_done_callback(unheard)
        return kept.loading

    @contextlib.asynccontextmanager
    async def _told_while(self, kept: KeptModel, tell: Tell) -> AsyncIterator[None]:
        """Tell what a model waits for while the body runs."""

        async def go_on() -> None:
            while True:
                tell(kept.why or f"waiting for the turn of {kept.model.name}")
                await asyncio.sleep(LOOK_S)

        telling = asyncio.create_task(go_on())
        try:
            yield
        finally:
            telling.cancel()

    async def _load(self, kept: KeptModel) -> None:
        """Give a model memory, and have its ring built; it has no address where others use it all.

        Those that may go make room. Raises PlanError or CapacityError where that would be in vain,
        and what building raises.
        """
        name, kept.lacks_bytes = kept.model.name, 0
        kept.state, kept.why, kept.tried_s = "loading", f"{name} is being planned", self.clock()
        try:
            while not (placed := await self._placed(kept)):
                try:
                    await self._one_goes(name, self._beside(kept))
                except BusyError as error:
                    kept.state, kept.why = "waiting", error.message
                    return
            kept.plan, kept.address = placed
            kept.state, kept.why = "loaded", ""
            self.log(f"{name} is loaded on {_names(kept.plan)}")
        except BaseException as error:
            kept.state, kept.why = "unloaded", str(error)
            self.log(f"{name} cannot be loaded: {error}")
            await self._orders.limit(kept, {})
            raise

    async def _placed(self, kept: KeptModel) -> tuple[PlanReply, str] | None:
        """Plan the ring of a model and have it built; return its plan, and where it is asked.

        Raises as `_planned` and `_build`; where nodes are lost meanwhile it is tried again.
        """
        for n_left in reversed(range(MOST_TRIES)):
            try:
                plan = await self._planned(kept)
                return None if plan is None else (plan, await self._orders.build(kept))
            except (LinkError, PeerFailedError):
                if not n_left:
                    raise
                await asyncio.sleep(LOOK_S)
        raise AssertionError("the last try returns or raises")

    async def _planned(self, kept: KeptModel) -> PlanReply | None:
        """Plan a model over what nodes have free, and give its runners what that needs.

        Nodes that no other ring uses are preferred. Returns None where the others have too much of
        the memory; raises PlanError or CapacityError if it is too little without them.
        """
        others = [one for one in self._kept.values() if one is not kept and one.used]
        busy = set[NodeId]().union(*(one.used for one in others))
        free = await self._free(kept)
        plans: list[PlanReply | None] = []
        failure: ShardnetError | None = None
        for avoided in ([busy] if busy and free.keys() - busy else []) + [set[NodeId]()]:
            room = {node: n_bytes for node, n_bytes in free.items() if node not in avoided}
            try:
                await self._orders.limit(kept, room)
                plans.append(await self._orders.plan(kept))
            except _NO_ROOM as error:
                plans.append(None)
                failure = error
        alone = plans[0] if len(plans) == 2 else None
        plan = alone if is_better_alone(alone, plans[-1]) else plans[-1]
        if plan is None:
            if not others and failure is not None:
                raise failure
            return None
        at = {share.node: node for node, share in kept.shares.items()}
        need = {at[node]: n for node, n in needed(plan, kept.model.parallel).items() if node in at}
        room = {node: min(n_bytes, free.get(node, n_bytes)) for node, n_bytes in need.items()}
        await self._orders.limit(kept, room)
        return plan

    async def _free(self, kept: KeptModel) -> dict[NodeId, int]:
        """Return the memory that each node could give to a model, with what the model has there.

        Opens the runners that are not there yet.
        """
        infos = [info for info in await self.nodes() if takes_part(info, kept.model)]
        known = {NodeId(info.node) for info in infos}
        for node in kept.shares.keys() - known:
            del kept.shares[node]
        missing = [info for info in infos if info.node not in kept.shares]
        await asyncio.gather(*(self._orders.open(kept, info, 0) for info in missing))
        return {
            node: int(FREE_SHARE * info.memory_free_bytes) + kept.shares[node].memory_bytes
            for info in infos
            if (node := NodeId(info.node)) in kept.shares
        }

    async def _find_runners(self, kept: KeptModel, infos: Sequence[NodeInfo]) -> None:
        """Find what a model has already, by the word of another leader or of an earlier run."""
        nodes = {NodeId(info.node) for info in infos}
        unknown = [info for info in infos if info.node not in kept.looked_at | kept.shares.keys()]
        kept.looked_at = nodes
        await asyncio.gather(*(self._orders.open(kept, info, None) for info in unknown))
        if unknown and kept.state == "unloaded" and kept.used:
            kept.state, kept.lost_s = "lost", self.clock()
            if await self._leads(kept):
                self.log(f"{kept.model.name} is loaded already")

    async def _unload(self, kept: KeptModel, idle_s: float | None, why: str = "") -> bool:
        """Have a model's ring freed; say whether it was: nobody may have asked for `idle_s`.

        With None its memory is taken in any case.
        """
        if kept.address:
            if idle_s is not None and self.clock() - kept.asked_s < idle_s:
                return False
            message = Unload(request=0, idle_s=idle_s or 0.0)
            try:
                await self._orders.ask_ring(kept, kept.address, message)
            except BusyError:
                if idle_s is not None:
                    return False
            except ShardnetError as error:
                self.log(f"{kept.model.name} could not be unloaded: {error}")
        kept.address, kept.plan, kept.load = "", None, None
        kept.state, kept.why = "unloaded", why and f"it {why}"
        await self._orders.limit(kept, {})
        self.log(f"{kept.model.name} was unloaded{': it ' + why if why else ''}")
        return True

    def _beside(self, kept: KeptModel) -> list[KeptModel]:
        """List the models that have memory of nodes which another one may have."""
        return [
            one
            for one in self._kept.values()
            if one is not kept and one.address and one.used & kept.shares.keys()
        ]

    def _counted(self, kept: KeptModel) -> Loaded:
        return Loaded(
            name=kept.model.name,
            priority=kept.model.priority,
            kept=kept.model.kept,
            is_in_use=bool(kept.n_requests or kept.n_waiting),
            asked_s=kept.asked_s,
        )

    # --- looking after rings

    async def _look(self) -> None:
        """See how rings and nodes are; make up for what was lost, and load what is to stay."""
        await asyncio.gather(*map(self._leads, self._kept.values()))
        infos = {NodeId(info.node): info for info in await self.nodes()}
        here = {node for node, info in infos.items() if is_here(info)}
        for kept in [one for one in self._ordered() if not one.is_encoder]:
            if infos.keys() - kept.looked_at:
                async with self._changing:
                    await self._find_runners(kept, [*infos.values()])
            for node in kept.used - here:
                kept.lacks_bytes += kept.shares.pop(node).memory_bytes
                kept.plan = None
            if kept.state in ("loaded", "lost") and kept.lacks_bytes:
                async with self._changing:
                    await self._make_up(kept)
            if kept.address and kept.plan is None:  # another leader loaded it, or a node has gone
                async with self._changing:
                    if kept.address:  # it was not unloaded meanwhile
                        with contextlib.suppress(ShardnetError):
                            kept.plan = await self._orders.plan(kept)
        for kept in [one for one in self._ordered() if not one.is_encoder]:
            idle_s, due_s = kept.model.idle_s, kept.tried_s + AGAIN_S
            if kept.address and idle_s is not None and not (kept.n_requests or kept.n_waiting):
                if self.clock() - kept.asked_s > idle_s:
                    async with self._changing:
                        await self._unload(kept, idle_s, f"was not used for {idle_s:g} s")
            elif kept.address or self._may_come_back(kept):
                continue
            elif kept.model.kept and self.clock() > due_s:
                kept.tried_s = self.clock()
                self._loading(kept)
            elif kept.state == "lost" and self.clock() - kept.lost_s > GIVEN_BACK_S:
                async with self._changing:
                    await self._unload(kept, None, "has lost its ring")

    async def _free_on(self, node: NodeId, model: str, free_bytes: int) -> None:
        """Unload models until a node has so much free for another one, or none is left there.

        Raises CapacityError where they are to stay, BusyError while they are in use.
        """
        async with self._changing:
            while True:
                free = {info.node: info.memory_free_bytes for info in await self.nodes()}
                loaded = [one for one in self._kept.values() if one.address and node in one.used]
                if not loaded or free.get(node, free_bytes) >= free_bytes:
                    return
                await self._one_goes(model, loaded)

    async def _one_goes(self, model: str, loaded: Sequence[KeptModel]) -> None:
        """Unload one of the models that are loaded, for another one.

        Raises CapacityError where all are to stay, BusyError while those that may go are in use.
        """
        users = ", ".join(one.model.name for one in loaded) or "others"
        if loaded and all(one.model.kept for one in loaded):
            raise CapacityError(
                f"{model} does not fit beside {users}, which the household keeps loaded",
                remedy="keep fewer models, or give nodes more --memory",
            )
        going = victim(map(self._counted, loaded))
        if not going or not await self._unload(
            self._kept[going], LATELY_S, f"makes room for {model}"
        ):
            raise BusyError(
                f"{model} waits for memory: {going or users} in use", remedy="ask again"
            )

    async def _make_room(self, control: ControlLink, message: MakeRoom) -> None:
        """Make room for an encoder on the node that asks."""
        if message.model not in self._kept:
            raise UsageError(f"{message.model} is no model that this node leads")
        node = NodeId(control.link.peer.node)
        await self._free_on(node, message.model, message.free_bytes)
        control.send(Done(request=message.request))

    async def _leads(self, kept: KeptModel) -> bool:
        """See how a model's ring is: whether it stands, at its head or another of its runners."""
        if kept.state not in ("loaded", "lost"):
            return False
        led = await self._orders.led(kept)
        if kept.state not in ("loaded", "lost"):  # it was unloaded meanwhile
            return False
        if led is not None:
            kept.address, kept.load = led
            kept.state, kept.why = "loaded", ""
            return True
        if kept.state != "lost":
            self.log(f"{kept.model.name} has no ring any more")
            kept.lost_s, kept.why = self.clock(), f"{kept.model.name} has lost its ring"
        kept.address, kept.load, kept.state = "", None, "lost"
        return False

    def _may_come_back(self, kept: KeptModel) -> bool:
        """Say whether the ring that a model has lost may still be built anew by what is left."""
        return kept.state == "lost" and self.clock() - kept.lost_s < LOST_S

    async def _make_up(self, kept: KeptModel) -> None:
        """Give runners of a model what one that is lost had, for its ring to be built anew.

        Less important models make room, once nobody uses them: until then it is tried again.
        """
        while True:
            free = await self._free(kept)
            had = {node: share.memory_bytes for node, share in kept.shares.items()}
            spare = {node: n_bytes - had[node] for node, n_bytes in free.items()}
            others, going = self._beside(kept), ""
            if sum(spare.values()) < kept.lacks_bytes:
                going = victim(map(self._counted, others), below=kept.model.priority)
            if not going or not await self._unload(
                self._kept[going], LATELY_S, f"makes room for {kept.model.name}"
            ):
                break
        added = made_up(kept.lacks_bytes, spare)
        kept.lacks_bytes = max(0, kept.lacks_bytes - sum(added.values()) - len(added))
        await self._orders.limit(kept, {node: had[node] + added.get(node, 0) for node in had})


def _names(plan: PlanReply) -> str:
    return ", ".join(stage.name for stage in plan.stages)
