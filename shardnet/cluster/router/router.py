"""Takes what clients send to this node: for several rings behind it, or for its own alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from msgspec.structs import replace

from shardnet import errors
from shardnet.cluster.deputy.copied_requests import CopiedRequest
from shardnet.cluster.deputy.copying import Copying
from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.encoders import Encoders
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.replies import report_progress
from shardnet.cluster.head.requests import with_ids
from shardnet.cluster.household.household import Household
from shardnet.cluster.member.refusals import draining, generating_with, resting
from shardnet.cluster.peers.control_link import (
    ControlLink,
    MessageHandlers,
    RedirectedError,
    refuse,
)
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.placement.figures import Objective
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.cluster.router.front import Front
from shardnet.cluster.router.kept_ring import KeptRing
from shardnet.cluster.router.routed_request import RING_ERRORS, RoutedRequest, prompt_bytes
from shardnet.runtime.engine.requests import MadeToken
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most
from shardnet.types import Epoch, LiveState, NodeId
from shardnet.wire.framing.schema import MAX_STAGES, Numbered
from shardnet.wire.messages.activity import KeepRing, RingKept
from shardnet.wire.messages.chat import DescribeTokenizer
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.deputies import RingNode, StandBy
from shardnet.wire.messages.diagnostics import RingBehind
from shardnet.wire.messages.generation import (
    Detokenize,
    Generate,
    StateChanged,
    Tokenize,
    Tokenized,
    Unload,
)
from shardnet.wire.messages.handshake import PeerRole
from shardnet.wire.messages.membership import Status, StatusReply
from shardnet.wire.messages.plans import ModelChoice, NodeProgress, PlanRequest

LOOK_S: Final = 0.25
"""Interval of the looks at the ring."""
TELL_S: Final = 5.0
"""The longest time without a word of it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    keeper: ControlLink
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Keeping:
    """The rings that this node keeps for others, or for itself: one at a time but for moments."""

    def __init__(self, *, head: Head, clients: Clients) -> None:
        self._head = head
        self._clients = clients
        self._kept: set[_Kept] = set()

    async def keep(self, control: ControlLink, message: KeepRing) -> None:
        """Build the ring if need be, and tell how it is until it is over; Redirect elsewhere.

        Raises what ends it, and what building raises.
        """
        async with self._clients.leading(
            control,
            message.request,
            message.choice,
            on_plan=lambda plan: control.send(plan.reply(message.request)),
        ) as lead:
            kept = _Kept(keeper=control)
            self._kept.add(kept)
            try:
                await self._tell(control, message.request, lead, kept)
            finally:
                self._kept.discard(kept)
        raise errors.PeerFailedError(f"the ring of {self._head.node} is kept no more")

    @property
    def keeper(self) -> NodeId | None:
        """The other node that has the ring kept, None for none."""
        for kept in self._kept:
            peer = kept.keeper.link.peer
            if peer.role is PeerRole.NODE and not kept.keeper.link.closed:
                return NodeId(peer.node)
        return None

    async def let_go(self) -> None:
        """Keep nothing any more; return when nothing counts as in use for that."""
        while self._kept:
            for kept in self._kept:
                kept.is_over.set()
            await asyncio.sleep(0)

    async def _tell(self, control: ControlLink, request: int, lead: Lead, kept: _Kept) -> None:
        told, told_s = None, 0.0
        while not kept.is_over.is_set():
            if self._head.is_draining:
                raise draining()
            if self._head.rests:
                raise resting(self._head.rests)
            if self._head.led.lead is not lead or not lead.stands:
                raise errors.PeerFailedError("the ring was lost")
            now_s = time.monotonic()
            answer = RingKept(
                request=request,
                load=lead.ring.engine.counters,
                is_recovering=lead.is_recovering,
            )
            if answer != told or now_s - told_s >= TELL_S:
                control.send(answer)
                told, told_s = answer, now_s
            async with at_most(LOOK_S):
                await kept.is_over.wait()


FREE_S = 5.0
"""How long the head of another ring may take to free it."""
ASK_S = 1.0
"""How long another node may take to say what it leads."""

Asked = TypeVar("Asked", Tokenize, Detokenize, DescribeTokenizer)


@dataclass(kw_only=True, eq=False, repr=False)
class Router:
    """What clients ask of this node. `head` leads its own ring, `clients` answer for that.
    `encoders` are beside it, models of the `household` elsewhere. A runner computes what it
    `serves`.

    `own_link` opens a control link to this very node, `link_to` gives that to the node at another
    address, `address_of` the address of a node. Jobs run in `tasks`, a group that outlives it.
    """

    head: Head
    planner: Planner
    clients: Clients
    encoders: Encoders
    copying: Copying
    household: Household
    serves: ModelChoice | None
    own_link: Callable[[], Awaitable[Link]]
    link_to: Callable[[str], Awaitable[ControlLink]]
    address_of: Callable[[NodeId], str]
    tasks: asyncio.TaskGroup
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._jobs = SupervisedJobs(self.tasks, self.log)
        self._keeping = Keeping(head=self.head, clients=self.clients)
        self._changing = asyncio.Lock()
        self._front: Front | None = None
        self._to_self: ControlLink | None = None
        self.head.model_led_at = self._model_led_at
        self.leader = ""
        """The node by whose word alone a runner has a ring built, "" for anybody's."""
        self.entrance: Callable[[], str] = str
        """Gives the address where others are to ask who come to a runner without a ring."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what needs a ring."""
        handlers.register(Generate, self.generate)
        handlers.register(PlanRequest, self._plan)
        handlers.register(Tokenize, self._tokenize)
        handlers.register(Detokenize, self._detokenize)
        handlers.register(DescribeTokenizer, self._describe_tokenizer)
        handlers.register(Unload, self._unload_for)
        handlers.register(KeepRing, self._keeping.keep)

    @property
    def rings(self) -> list[RingBehind]:
        """The rings behind this head, none where it leads one alone."""
        return [] if self._front is None else [ring.seen() for ring in self._front.rings]

    @property
    def n_requests(self) -> int:
        """Requests that wait or run on several rings."""
        return 0 if self._front is None else self._front.use.n_users

    @property
    def idle_s(self) -> float | None:
        """Seconds since a request used a ring of this node, None without one."""
        return self.head.idle_s if self._front is None else self._front.use.idle_s

    async def close(self) -> None:
        """End what runs. Other rings are freed by their heads when nobody uses them."""
        self._front = None
        await self._jobs.close()

    # --- for clients

    async def generate(self, control: ControlLink, message: Generate) -> None:
        """Run one request and stream its tokens and rows, or reply Redirect."""
        message = replace(message, choice=self._served(message.choice))
        made = [MadeToken(token_id=token_id) for token_id in message.made]
        request = message.request

        def tell(why: str) -> None:
            report_progress(control, request, 0, "waiting", 0, 0)
            control.tell(StateChanged(request=request, state=LiveState.QUEUED, why=why))

        front = await self._front_for(control, request, message.choice, tell)
        if front is not None:
            await self._route(front, control, message, made, len(made))
        else:
            await self.clients.generate(control, message)

    async def _plan(self, control: ControlLink, message: PlanRequest) -> None:
        """Reply with a plan, of a model of the household as if it were alone, or Redirect."""
        if self.household.has(message.choice.model):
            self.household.check_leads()
            message = replace(message, choice=self.household.choice(message.choice.model))
        await self.clients.plan(control, message)

    async def resume(
        self, control: ControlLink, request: int, copied: CopiedRequest, n_tokens: int
    ) -> None:
        """Go on with an answer, from its token number `n_tokens` on, or reply Redirect."""
        message, front = replace(copied.generate, request=request), self._front
        if front is not None and front.suits(message.choice):
            copied.check_model(front.plan.facts.model_id)
            await self._route(front, control, message, copied.tokens[:n_tokens], n_tokens)
        else:
            await self.clients.resume(control, request, copied, n_tokens)

    async def unload(self, model: str = "", idle_s: float = 0.0) -> None:
        """End the rings of this node and free them on every node; see Head.unload.

        While this node rests only its own ring is freed: the others go on.
        """
        front = self._front
        if front is None or self.head.rests:
            await self._keeping.let_go()
            await self.head.unload(model, idle_s)
        elif model in ("", front.choice.model):
            async with self._changing:
                await self._end(front, idle_s)

    def give_way(self, address: str) -> None:
        """Have clients go on at the node at `address`, which leads in place of this one."""
        front, self._front = self._front, None
        if front is not None:
            error = errors.SupersededError(f"the node at {address} leads in place of this one")
            error.address = address
            front.abandon(error)
            self._jobs.begin(front.close, "leaving several rings")

    async def _unload_for(self, control: ControlLink, message: Unload) -> None:
        if not message.model:
            self.encoders.free_idle()
        if self.household.has(message.model):
            self.household.check_leads()
            await self.household.unload(message.model, message.idle_s)
            control.send(Done(request=message.request))
        elif address := self._keeper_of(control):
            raise RedirectedError(address)
        elif self._front is None:
            if message.model in ("", self.head.model):
                await self._keeping.let_go()
            await self.clients.unload(control, message)
        else:
            choice = ModelChoice(model=message.model)
            model = (await self.clients.settled(choice)).model if message.model else ""
            await self.unload(model, message.idle_s)
            control.send(Done(request=message.request))

    async def _tokenize(self, control: ControlLink, message: Tokenize) -> None:
        await self._ask(control, message, message.generate.choice, self.clients.tokenize)

    async def _detokenize(self, control: ControlLink, message: Detokenize) -> None:
        await self._ask(control, message, message.choice, self.clients.detokenize)

    async def _describe_tokenizer(self, control: ControlLink, message: DescribeTokenizer) -> None:
        await self._ask(control, message, message.choice, self.clients.describe_tokenizer)

    async def _ask(
        self,
        control: ControlLink,
        message: Asked,
        choice: ModelChoice,
        alone: Callable[[ControlLink, Asked], Awaitable[None]],
    ) -> None:
        """Answer what takes no slot: from any ring, or from the one that is led `alone`."""
        choice = self._served(choice)
        message = _asked_of(choice, message)
        request = message.request

        def tell(why: str) -> None:
            report_progress(control, request, 0, "waiting", 0, 0)

        front = await self._front_for(control, request, choice, tell)
        if front is None:
            await alone(control, message)
            return
        with front.use.in_use():
            await front.opened(partial(_pass_on, control, request))
            answer = await self._any_ring(front, message)
        control.send(replace(answer, request=request))

    async def _any_ring(self, front: Front, message: Asked) -> Numbered:
        """Return the answer of any ring, of another one where one is lost.

        Raises what the last one reports, LinkError if it is lost too.
        """
        tried: set[tuple[KeptRing, int]] = set()
        last: errors.ShardnetError | None = None
        while True:
            try:
                ring = await front.ring_for(b"", tried)
            except errors.SupersededError:
                raise
            except errors.ShardnetError as error:
                raise last or error from None
            tried.add((ring, ring.n_times))
            try:
                return await self._answer_of(ring, message)
            except RING_ERRORS as error:
                last = error

    async def _answer_of(self, ring: KeptRing, message: Asked) -> Numbered:
        async with ring.conversation(_asked_of(ring.plan.choice, message)) as answers:
            async for answer in answers:
                if not isinstance(answer, NodeProgress):
                    return answer
        raise AssertionError("the conversation ends with an answer, or raises")

    # --- several rings

    async def _route(
        self,
        front: Front,
        control: ControlLink,
        message: Generate,
        made: Sequence[MadeToken],
        n_sent: int,
    ) -> None:
        """Run a request whose answer begins with `made`; the client has `n_sent` tokens of it."""
        message = replace(message, lockstep_size=0)  # the others of its set may run elsewhere
        try:
            with front.use.in_use():
                await self._run(front, control, message, made, n_sent)
        except errors.SupersededError as error:
            if message.outputs.asks or not error.address or control.link.closed:
                raise
            raise RedirectedError(error.address) from error

    async def _run(
        self,
        front: Front,
        control: ControlLink,
        message: Generate,
        made: Sequence[MadeToken],
        n_sent: int,
    ) -> None:
        control.send(front.plan.reply(message.request))
        await front.opened(partial(_pass_on, control, message.request))
        if message.outputs.asks:  # rows are many: they go straight to the client
            choice = front.plan.choice.asked_as(message.choice)
            await self.clients.generate(control, replace(message, choice=choice))
            return
        described, prompt = message, prompt_bytes(message)
        if message.key:
            tokenized = await self._any_ring(front, Tokenize(request=0, generate=message))
            if not isinstance(tokenized, Tokenized):
                raise errors.RemoteProtocolError(f"a ring answered Tokenize: {tokenized}")
            described = with_ids(message, tokenized.token_ids)
        with self.copying.copied(control, described, made, partial(self._stand_by, front)) as copy:
            request = RoutedRequest(
                control,
                replace(described, request=message.request),
                prompt=prompt,
                made=[token.token_id for token in made],
                n_sent=n_sent,
                copy=copy,
            )
            await request.run(front)

    def _stand_by(self, front: Front) -> StandBy:
        """Say what a deputy needs to know: the head of another ring is one."""
        lead = self.head.latest
        told = front.plan.stand_by(Epoch(0) if lead is None else lead.ring.epoch)
        heads = [ring.nodes[0] for ring in front.plan.rings]
        nodes = [RingNode(node=head.node, address=head.address) for head in heads]
        return replace(told, choice=front.choice, nodes=[*nodes, *told.nodes[1:]][:MAX_STAGES])

    async def _front_for(
        self, control: ControlLink, request: int, choice: ModelChoice, tell: Callable[[str], None]
    ) -> Front | None:
        """Return the rings for a choice, opened if that is best; None for the one of this node.

        A model of the household is elsewhere; `tell` takes what it waits for.
        Who has this node's ring kept behind it is asked first: it frees its rings for what these
        are not, if nothing runs on them. Raises BusyError while requests run on several rings that
        are not what is asked for, RedirectedError if another node is to be asked.
        """
        if self._is_early(control):
            raise RedirectedError(self.entrance())
        if self.household.has(choice.model):
            raise RedirectedError(await self.household.address_of(choice.model, tell))
        choice = await self.clients.settled(choice)
        if choice.nodes and self._stands(choice):
            return None
        if address := self._keeper_of(control):
            raise RedirectedError(address)
        stale = self._front
        if choice.nodes:
            await self._leave(stale)
            return None
        if stale is None and not self._may_divide(choice):
            return None
        if stale is not None and await self._serves(stale, choice) and stale is self._front:
            if self.head.is_draining:
                raise draining()
            return stale
        async with self._changing:
            front = self._front
            if front is not None and front is not stale and front.suits(choice):
                return front
            if front is not None:
                await self._end(front)
            return await self._open(control, request, choice) if self._may_divide(choice) else None

    def _is_early(self, control: ControlLink) -> bool:
        """Say whether a client asks a runner that has no ring as yet, or none any more."""
        if not self.leader or control.link.peer.node == self.leader:
            return False
        return self.head.model is None and self.head.elsewhere() is None

    def _served(self, choice: ModelChoice) -> ModelChoice:
        """Return what is computed here for a choice: what this runner serves, if it is one."""
        return choice if self.serves is None else self.serves.asked_as(choice)

    async def _serves(self, front: Front, choice: ModelChoice) -> bool:
        """Say whether rings are what `choice` asks for, and their checkpoint is unchanged."""
        if not front.suits(choice) or front.is_over:
            return False
        return not await self.planner.has_changed(front.plan.facts, choice.model)

    def _keeper_of(self, control: ControlLink) -> str:
        """Return the address of the node that has this one's ring kept, "" if it asks itself."""
        keeper = self._keeping.keeper
        return "" if keeper in (None, control.link.peer.node) else self.address_of(keeper)

    def _stands(self, choice: ModelChoice) -> bool:
        """Say whether the ring that this node leads is what `choice` asks for."""
        lead = self.head.latest
        return lead is not None and lead.stands and lead.suits(choice)

    async def _leave(self, front: Front | None) -> None:
        """End several rings, if there are any. Raises as `_end`."""
        if front is not None:
            async with self._changing:
                if front is self._front:
                    await self._end(front)

    def _may_divide(self, choice: ModelChoice) -> bool:
        """Say whether several rings may be opened: for many sequences, and where there is none."""
        if choice.optimise != Objective.THROUGHPUT.value or choice.adapters:
            return False
        is_free = self.head.elsewhere() is None and not self.head.is_draining
        return is_free and not self._stands(choice)

    async def _open(self, control: ControlLink, request: int, choice: ModelChoice) -> Front | None:
        """Open several rings if that is best. What is wrong with the choice is said elsewhere."""
        progress = partial(report_progress, control, request)
        try:
            await self.planner.provide(choice.model, partial(progress, 0, "downloading"))
            plan = await self.planner.plan_awake(
                choice,
                partial(progress, 0, "measuring"),
                lambda plan: None,
                progress,
            )
        except (errors.CheckpointError, errors.PlanError):
            return None
        if isinstance(plan, Elsewhere):
            raise RedirectedError(plan.address)
        if not plan.beside:
            return None
        self.head.led.check_idle()
        self.log(f"{choice.model}: {plan.why}")
        front = self._front = Front(choice, plan, self._reach_head, self._jobs, self.log)
        return front

    async def _end(self, front: Front, idle_s: float = 0.0) -> None:
        """Free all rings. Raises BusyError if a request has used one within `idle_s`, or does."""
        if front.use.n_users or front.use.idle_s < idle_s:
            raise generating_with(front.choice.model)
        self._front = None
        await front.close()
        await self._keeping.let_go()
        await asyncio.gather(*(self._free(plan) for plan in front.plan.beside))
        await self.head.unload()

    async def _free(self, plan: Plan) -> None:
        """Have another head free its ring, if it is there."""
        with contextlib.suppress(errors.ShardnetError, TimeoutError):
            async with asyncio.timeout(FREE_S):
                control = await self._reach_head(plan)
                message = Unload(request=0, model=plan.choice.model)
                await control.ask(message, Done)

    async def _reach_head(self, plan: Plan) -> ControlLink:
        head = plan.nodes[0]
        return await self.reach(head.node, head.address)

    async def _model_led_at(self, address: str) -> str:
        """Ask the node at an address for the model of the ring that it leads, "" for none."""
        with contextlib.suppress(errors.ShardnetError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                control = await self.link_to(address)
                told = await control.ask(Status(request=0, with_peers=False), StatusReply)
            if told.load is not None and told.node.stage is not None:
                return told.node.stage.model
        return ""

    async def reach(self, node: str, address: str) -> ControlLink:
        """Return the control link to a node, which may be this one. Raises LinkError."""
        if node != self.head.node:
            return await self.link_to(address)
        if self._to_self is None or self._to_self.link.closed:
            control = self._to_self = ControlLink(await self.own_link(), refuse)
            self._jobs.begin(control.serve_to_the_end, "a link of this node to itself")
        return self._to_self


def _asked_of(choice: ModelChoice, message: Asked) -> Asked:
    """Return the message as it is sent to the head of one ring."""
    if isinstance(message, Tokenize):
        return replace(message, generate=replace(message.generate, choice=choice))
    return replace(message, choice=choice)


def _pass_on(control: ControlLink, request: int, told: NodeProgress) -> None:
    report_progress(control, request, told.rank, told.phase, told.done_bytes, told.total_bytes)
