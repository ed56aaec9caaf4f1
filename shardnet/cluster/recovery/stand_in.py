"""Go on in the place of a head that is lost or leaves, with what it has copied here.

Knows when a deputy takes over, and when a former head gives way. Must not know how plans are made,
rings built or requests run.

A node that was frozen or cut off has lost all its links at once: that nobody answers says nothing
of the head. So a head is lost at once where a node that answers has no link to it either; where
none answers, only when it has not been reached for longer than links take to come back.
Its ring has a larger epoch than any that the former head can build: nodes refuse that one's orders
from then on, and it gives way as soon as it hears of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import structs

from shardnet.cluster.deputy.copied_requests import CopiedRequests, read, replaced
from shardnet.cluster.deputy.copying import Copying, Deputy
from shardnet.cluster.head.head import Head
from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers, RedirectedError
from shardnet.cluster.peers.peer_links import PeerLinks
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.router.router import Router
from shardnet.errors import PeerFailedError, ShardnetError, UsageError
from shardnet.runtime.engine.engine import Engine
from shardnet.transport.loop import at_most
from shardnet.types import U32_MAX, Epoch, LiveState, NodeId, remember
from shardnet.wire.messages import deputies
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import DeputyState
from shardnet.wire.messages.generation import StateChanged

ASK_S: Final = 1.0
"""How long a node may take to answer, or to notice what another one has noticed."""
AGAIN_S: Final = 0.1
SEEN_S: Final = 6.0
"""How long others may still see a head that is lost, or be out of reach themselves."""
ALONE_S: Final = 1.0
"""How long a head is waited for where there is nobody else to ask."""
STAND_IN_S: Final = 20.0
"""How long a deputy tries to take over."""

LinkOf = Callable[[NodeId], ControlLink | None]


async def is_lost(head: NodeId, others: Sequence[NodeId], link_of: LinkOf) -> bool:
    """Say whether `head` is lost to all nodes of its ring, not to this one alone."""
    began_s = time.monotonic()
    while link_of(head) is None:
        asked = deputies.FindNode(request=0, node=head)
        found = await asyncio.gather(
            *(
                link.try_to_ask(asked, deputies.NodeFound, ASK_S)
                for link in map(link_of, others)
                if link
            )
        )
        seen = [one.is_linked for one in found if one is not None]
        if seen and not any(seen):
            return True
        if time.monotonic() - began_s > (SEEN_S if others else ALONE_S):
            return not any(seen)
        await asyncio.sleep(AGAIN_S)
    return False


def former_head(membership: RingMembership | None, node: NodeId) -> NodeId | None:
    """Return the other node that led the ring which ended here, if no other ring has this one."""
    if membership is None or not membership.is_over or membership.owner == node:
        return None
    return NodeId(membership.owner)


async def until_succeeded(head: NodeId, links: PeerLinks, is_former: Callable[[], bool]) -> None:
    """Wait while another node may take over from `head`, whose ring has ended here.

    That is so while `is_former` and that node has copies of requests that run there. A head that is
    linked to either lives, or its end is not noticed yet: it is waited for a moment only.
    """
    began_s = time.monotonic()
    while is_former():
        asked, linked = deputies.FindNode(request=0, node=head), links.linked()
        found = await asyncio.gather(
            *(control.try_to_ask(asked, deputies.NodeFound, ASK_S) for control in linked)
        )
        standing_by = [one for one in found if one is not None and one.stands_by]
        is_seen = links.link_of(head) is not None or any(one.is_linked for one in standing_by)
        waited_s = time.monotonic() - began_s
        if not standing_by or waited_s > (ASK_S if is_seen else STAND_IN_S):
            return
        await asyncio.sleep(AGAIN_S)


async def keeper_of(key: str, links: PeerLinks) -> NodeId | None:
    """Ask all nodes which of them has the answer to a request with `key`; None where none has."""
    asked, linked = deputies.FindAnswer(request=0, key=key), links.linked()
    found = await asyncio.gather(
        *(control.try_to_ask(asked, deputies.AnswerFound, ASK_S) for control in linked)
    )
    for control, one in zip(linked, found, strict=True):
        if one is not None and one.is_kept:
            return NodeId(control.link.peer.node)
    return None


EPOCHS: Final = 1 << 16
"""A deputy's epochs begin so many later: a head builds fewer rings than that."""
HOLD_S: Final = 2.0
"""How long a head that leaves waits for its steps."""
OFFER_S: Final = 5.0
"""How long its requests go on before a deputy that could not take over is asked again."""
EXPECTED_S: Final = 2.0
"""How long taking over is expected to take."""
MAX_DUTIES: Final = 8
"""Heads that one node stands by for."""
MAX_FORMER: Final = 64
"""Heads that are remembered because this node took their place."""


@dataclass(slots=True, kw_only=True, eq=False)
class Duty:
    """A head that this node stands by for, and what it has copied here."""

    head: NodeId
    name: str
    told: deputies.StandBy
    control: ControlLink
    requests: CopiedRequests = field(default_factory=CopiedRequests)
    stop_watching: Callable[[], None] = lambda: None
    standing_in: asyncio.Task[bool] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this node begins to stand in."""


@dataclass(kw_only=True, eq=False, repr=False)
class StandIn:
    """Stands by for heads, takes over from them, and gives way. `node` is this node.

    `address_of` gives the address of a node. Its work runs in `tasks`, a group that outlives it.
    """

    node: NodeId
    head: Head
    planner: Planner
    router: Router
    copying: Copying
    links: PeerLinks
    address_of: Callable[[NodeId], str]
    tasks: asyncio.TaskGroup
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._duties: dict[NodeId, Duty] = {}
        self._jobs = SupervisedJobs(self.tasks, self.log)
        self._is_closing = False
        self._not_before_s = 0.0
        self._former: dict[NodeId, int] = {}
        """Heads whose place this node took, with the epochs of the rings that came instead."""
        self.head.until_settled = self._settled
        self.links.on_up = self._tell_former

    def register(self, handlers: MessageHandlers) -> None:
        """Register what heads tell their deputies, and what is asked of either."""
        handlers.register(deputies.StandBy, self._stand_by)
        handlers.register(deputies.StandByRefused, self._refused)
        handlers.register(deputies.RequestCopied, self._request_copied)
        handlers.register(deputies.TokensCopied, self._tokens_copied)
        handlers.register(deputies.TakeOver, self._take_over_for)
        handlers.register(deputies.TakenOver, self._taken_over)
        handlers.register(deputies.FindNode, self._find_node)
        handlers.register(deputies.FindAnswer, self._find_answer)
        handlers.register(deputies.Resume, self._resume)

    @property
    def deputy(self) -> DeputyState | None:
        """The node that goes on with what this one leads, None without one."""
        deputy = self.copying.deputy
        if deputy is None or self.head.latest is None:
            return None
        n_requests = len(self.copying.requests.running)
        return DeputyState(node=deputy.control.link.peer.name, n_requests=n_requests)

    @property
    def deputy_of(self) -> list[DeputyState]:
        """The heads in whose place this node goes on."""
        return [
            DeputyState(node=duty.name, n_requests=len(duty.requests.running))
            for duty in self._duties.values()
        ]

    async def close(self) -> None:
        """End what runs."""
        self._is_closing = True
        for duty in self._duties.values():
            duty.stop_watching()
        await self._jobs.close()

    async def _settled(self) -> None:
        """Wait while it is not clear who leads in the place of a head.

        A ring that this node built meanwhile would keep nodes from the one that is to go on.
        """
        former = self._former_head()
        duty = None if former is None else self._duties.get(former)
        if duty is not None and duty.requests.running:
            await _until_begun(duty)
        standing_in = [one.standing_in for one in self._duties.values() if one.standing_in]
        if standing_in:
            await asyncio.wait(standing_in)
        elif former is not None:
            await until_succeeded(former, self.links, lambda: self._former_head() == former)

    def _former_head(self) -> NodeId | None:
        return former_head(self.head.host.membership, self.node)

    # --- as a deputy

    async def _stand_by(self, control: ControlLink, message: deputies.StandBy) -> None:
        head = NodeId(control.link.peer.node)
        duty = self._duties.get(head)
        if duty is None and len(self._duties) >= MAX_DUTIES:
            why = f"it stands by for {MAX_DUTIES} heads already"
            control.send(deputies.StandByRefused(why=why))
            return
        known = [] if duty is None else duty.told.adapters
        if duty is None or duty.control is not control:  # over a new link all is copied again
            if duty is not None:
                duty.stop_watching()
            name = control.link.peer.name
            duty = Duty(head=head, name=name, told=message, control=control)
            self._duties[head] = duty
            duty.stop_watching = self.links.watch(control, partial(self._head_lost, duty))
        duty.told = message
        if message.adapters != known:  # of the head's own layers no other node has them
            fetch = partial(self.planner.prepare_instead, message)
            self._jobs.begin(fetch, f"adapters of {duty.name}")

    async def _refused(self, control: ControlLink, message: deputies.StandByRefused) -> None:
        """Have another node stand by for this one."""
        self.copying.refused_by(NodeId(control.link.peer.node), message.why)

    async def _request_copied(self, control: ControlLink, message: deputies.RequestCopied) -> None:
        duty = self._duties.get(NodeId(control.link.peer.node))
        if duty is not None and message.generate.key:
            duty.requests.open(message.generate, duty.told.model_id, time.monotonic())

    async def _tokens_copied(self, control: ControlLink, message: deputies.TokensCopied) -> None:
        duty = self._duties.get(NodeId(control.link.peer.node))
        if duty is not None:
            now_s = time.monotonic()
            for row in message.rows:
                duty.requests.add(row.key, row.first, [*read(row.tokens)], row.end, now_s)

    async def _take_over_for(self, control: ControlLink, message: deputies.TakeOver) -> None:
        """Take over from a head that leaves. Raises UsageError unless this is its deputy."""
        duty = self._duties.get(NodeId(control.link.peer.node))
        if duty is None:
            raise UsageError("this node does not stand by for the one that asks")
        duty.stop_watching()
        self._begin(duty, f"{duty.name} leaves", is_sure=True)
        control.send(Done(request=message.request))

    def _head_lost(self, duty: Duty, error: ShardnetError) -> None:
        if self._duties.get(duty.head) is duty and duty.standing_in is None:
            self._begin(duty, f"{duty.name} was lost: {error}", is_sure=False)

    def _begin(self, duty: Duty, why: str, *, is_sure: bool) -> None:
        if not self._is_closing:
            duty.standing_in = self._jobs.begin(
                partial(self._stand_in, duty, why, is_sure), "a deputy"
            )
            duty.begun.set()

    async def _stand_in(self, duty: Duty, why: str, is_sure: bool) -> None:
        """Take over from a head, unless it lives. Requests that nobody resumes end here."""
        try:
            if not duty.requests.running or not (is_sure or await self._is_lost(duty)):
                return
            self.log(f"{why}; this node takes over {len(duty.requests.running)} requests")
            until_s = time.monotonic() + STAND_IN_S
            while True:
                try:
                    await self._take_over(duty)
                    return
                except ShardnetError as error:
                    if time.monotonic() > until_s or isinstance(error, UsageError):
                        self.log(f"this node cannot take over: {error}")
                        return
                await asyncio.sleep(AGAIN_S)
        finally:
            choice = structs.replace(duty.told.choice, nodes=[], layers=[])
            self.copying.requests.take_over(duty.requests, choice, time.monotonic())
            if self._duties.get(duty.head) is duty:
                del self._duties[duty.head]

    async def _is_lost(self, duty: Duty) -> bool:
        others = [NodeId(place.node) for place in duty.told.nodes[1:] if place.node != self.node]
        return await is_lost(duty.head, others, self.links.link_of)

    async def _take_over(self, duty: Duty) -> None:
        """Build a ring without the former head. Raises what planning and building raise."""
        told = duty.told
        lead, asked = self.head.latest, structs.replace(told.choice, nodes=[], layers=[])
        if lead is not None and lead.stands and lead.suits(asked):
            return  # it leads one of several rings behind the head that is lost: that goes on
        epoch = min(duty.told.epoch + EPOCHS, U32_MAX)

        async def plan() -> Plan:
            plan = await self.planner.plan_instead(told, {duty.head: "it was lost"})
            if (found := plan.facts.model_id) != told.model_id:
                error = replaced(told.choice.model, told.model_id, found)
                raise UsageError(error.message)  # it is not tried again
            return plan

        lead = await self.head.lead_instead(plan, duty.head, Epoch(epoch))
        lead.instead = told.choice
        self.copying.requests.take_over(duty.requests, lead.plan.choice, time.monotonic())
        self._succeed(duty.head, lead.ring.epoch)

    def _succeed(self, former: NodeId, epoch: int) -> None:
        """Note that a ring of this node, of this epoch, came in the place of that of another."""
        remember(self._former, former, epoch, MAX_FORMER)
        if (control := self.links.link_of(former)) is not None:
            self._tell_former(control)

    def _tell_former(self, control: ControlLink) -> None:
        """Tell a former head that it is one no more, over each link to it that comes up.

        The link of now may be lost already and not known to be.
        """
        epoch = self._former.get(NodeId(control.link.peer.node))
        if epoch is not None and not control.link.closed:
            control.send(deputies.TakenOver(epoch=epoch))

    async def _find_node(self, control: ControlLink, message: deputies.FindNode) -> None:
        node = NodeId(message.node)
        duty, is_linked = self._duties.get(node), self.links.link_of(node) is not None
        stands_by = duty is not None and bool(duty.requests.running)
        control.send(
            deputies.NodeFound(request=message.request, is_linked=is_linked, stands_by=stands_by)
        )

    async def _find_answer(self, control: ControlLink, message: deputies.FindAnswer) -> None:
        own = self.copying.requests.find(message.key, time.monotonic())
        is_kept = own is not None or self._duty_with(message.key) is not None
        control.send(deputies.AnswerFound(request=message.request, is_kept=is_kept))

    # --- for clients

    async def _resume(self, control: ControlLink, message: deputies.Resume) -> None:
        """Go on with an answer, or say where. Raises UsageError if no node knows of it."""
        duty = self._duty_with(message.key)
        if duty is not None:
            await _until_begun(duty)
            if duty.standing_in is not None and message.n_tokens:
                state = StateChanged(
                    request=message.request,
                    state=LiveState.RECOVERING,
                    why=f"{duty.name} is gone, and another node goes on",
                    expected_s=EXPECTED_S,
                )
                control.send(state)
            if duty.standing_in is not None:
                await asyncio.wait([duty.standing_in])
        copied = self.copying.requests.find(message.key, time.monotonic())
        if copied is not None:
            await self.router.resume(control, message.request, copied, message.n_tokens)
            return
        if duty is not None and duty.told.nodes:
            raise RedirectedError(duty.told.nodes[0].address)
        self.head.check_leads()
        if (keeper := await keeper_of(message.key, self.links)) is not None:
            raise RedirectedError(self.address_of(keeper))
        raise UsageError(
            "no node keeps an answer to a request of that id",
            remedy="ask within a minute, with the id that the request had, or ask anew",
        )

    def _duty_with(self, key: str) -> Duty | None:
        now_s = time.monotonic()
        holding = (
            one for one in self._duties.values() if one.requests.find(key, now_s) is not None
        )
        return next(holding, None)

    # --- as a head

    async def hand_over(self) -> bool:
        """Have the deputy go on with all that this node leads; return whether it does.

        One that could not is not asked again at once: requests stand still meanwhile.
        """
        self.copying.flush()  # the deputy of a ring that was just built is another one
        lead, deputy = self.head.latest, self.copying.deputy
        if lead is None or deputy is None or lead.is_recovering or lead.ring.broken is not None:
            return False
        if time.monotonic() < self._not_before_s:
            return False
        engine, n_copied = lead.ring.engine, len(self.copying.requests.running)
        if not n_copied or max(engine.n_active, self.router.n_requests) > n_copied:
            return False
        try:
            async with asyncio.timeout(HOLD_S), self.head.led.changing(lead):
                await self._offer(engine, deputy)
        except (ShardnetError, TimeoutError) as error:
            reason = str(error) or f"it did not answer within {HOLD_S:g} s"
            self.log(f"the deputy does not take over: {reason}")
            self._not_before_s = time.monotonic() + OFFER_S
            return False
        await self._give_way(deputy.address, deputy.told.epoch + EPOCHS)
        return True

    async def _offer(self, engine: Engine, deputy: Deputy) -> None:
        """Hold all requests and have the deputy take them over; if it does not, they go on."""
        try:
            await engine.hold()
            self.copying.flush()
            if self.copying.deputy is not deputy:
                raise PeerFailedError("the deputy was lost")
            order = deputies.TakeOver(request=0)
            await deputy.control.ask(order, Done)
        except BaseException:
            engine.release()
            raise

    async def _taken_over(self, control: ControlLink, message: deputies.TakenOver) -> None:
        """Give way to the deputy, which leads by now. Others cannot say so.

        It says so over each link: this node may have given way before.
        """
        deputy = NodeId(control.link.peer.node)
        if deputy in self.copying.appointed and message.epoch > self.head.led.epoch:
            self.log(f"{control.link.peer.name} leads in place of this node")
            await self._give_way(self.address_of(deputy), message.epoch)

    async def _give_way(self, address: str, epoch: int) -> None:
        self.copying.let_go()
        self.router.give_way(address)
        await self.head.give_way(address, epoch)


async def _until_begun(duty: Duty) -> None:
    """Wait a moment until this node stands in: a head's end is noticed here as it was elsewhere."""
    if duty.standing_in is None:
        async with at_most(ASK_S):
            await duty.begun.wait()
