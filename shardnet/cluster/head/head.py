"""The one ring that this node leads: found for a request, built, unloaded.

Knows whether a request can use the ring, and when another one replaces it. Must not know how plans
are made (planning.py), how clients are answered (clients.py) nor how a stage runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict

from shardnet.cluster.head.lead import Lead, Opening
from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.member.stage_host import StageHost, draining, generating_with, resting
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.message_handlers import MessageHandlers
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.cluster.ring.busy_backoff import BusyBackoff
from shardnet.cluster.ring.ring import OnStageProgress, Ring, give_up
from shardnet.errors import (
    BusyError,
    LinkError,
    PeerFailedError,
    PlanError,
    ShardnetError,
    SupersededError,
    error_for_code,
)
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.tokenizer import Tokenizer, no_tokenizer
from shardnet.transport.loop import finish
from shardnet.types import Epoch, NodeId
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import RingLoad, RingWork
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import DropWarm, RingBroken

CLOSE_S = 3.0
"""How long a head that shuts down waits for its stages to be freed."""
MOST_TRIES = 4
"""How often a ring is built for a request while nodes or links of it are lost."""


class Head:
    """Keeps at most one ring."""

    def __init__(
        self,
        *,
        node: NodeId,
        host: StageHost,
        planner: Planner,
        builder: RingBuilder,
        on_broken: Callable[[Lead], bool] = lambda lead: False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Take the parts that do the work.

        `on_broken` is called when the ring of a lead breaks; it returns whether it will be
        replaced: then its requests wait, else they fail. `log` takes lines for people.
        """
        self._node = node
        self._host = host
        self._planner = planner
        self._builder = builder
        self._on_broken = on_broken
        self._log = log
        self._changing = asyncio.Lock()
        self._lead: Lead | None = None
        self._epoch = 0
        self._building: Ring | None = None
        """The ring that is being built."""
        self.is_draining = False
        """Whether no more requests are taken."""
        self.rests = ""
        """Why no more requests are taken for the ring that stands, "" while they are."""
        self.opening: Opening | None = None
        """What is done now to have a ring for a request."""
        self.until_settled: Callable[[], Awaitable[None]] = _nothing
        """Waits while this node may be about to lead in the place of another."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages that stages send to their head."""
        handlers.register(RingBroken, self._stage_reports_broken)
        handlers.register(DropWarm, self._drop_warm_for)

    async def _stage_reports_broken(self, control: ControlLink, message: RingBroken) -> None:
        cause = error_for_code(message.code, f"{control.peer_name}: {message.message}")
        silent, reporter = NodeId(message.silent), NodeId(control.link.peer.node)
        self.ring_broken(message.ring, cause, silent or None, reporter)

    async def _drop_warm_for(self, control: ControlLink, message: DropWarm) -> None:
        if self._lead is not None and self._lead.ring.name == message.ring:
            self.drop_warm()
        control.send(Done(request=message.request))

    def drop_warm(self) -> None:
        """Free what the ring keeps in KV caches for requests to come."""
        if self._lead is not None and self._lead.stands:
            self._lead.ring.engine.drop_warm()

    @property
    def model(self) -> str | None:
        """The model of the ring, None without one."""
        return self._lead.plan.choice.model if self._lead and self._lead.stands else None

    @property
    def latest(self) -> Lead | None:
        """The ring that was built last and not unloaded, broken or not."""
        return self._lead

    @property
    def choice(self) -> ModelChoice | None:
        """What the ring that this node is in was opened for, None without one."""
        if self._lead is not None and self._lead.stands:
            return self._lead.plan.choice
        elsewhere = self._other_head()
        return None if elsewhere is None else ModelChoice(model=elsewhere.model)

    @property
    def idle_s(self) -> float | None:
        """Seconds since a request used the ring last, 0 while one does, None without a ring."""
        return self._lead.ring.idle_s if self.model is not None and self._lead else None

    @property
    def n_requests(self) -> int:
        """Requests that wait or run on the ring."""
        return self._lead.ring.engine.n_active if self.model is not None and self._lead else 0

    @property
    def load(self) -> RingLoad | None:
        """Counters of the ring's engine, None without a ring."""
        if self._lead is None or not self._lead.stands:
            return None
        return RingLoad(**asdict(self._lead.ring.engine.counters))

    @property
    def work(self) -> RingWork | None:
        """What the ring has done so far, None without one."""
        load = self.load
        if load is None or self._lead is None:
            return None
        return self._lead.ring.work(load)

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self._node

    @property
    def is_in_use(self) -> bool:
        """Whether requests wait or run on the ring that this node leads."""
        return self._lead is not None and self._lead.stands and self._lead.ring.is_in_use

    def check_idle(self) -> None:
        """Raise BusyError, which names the model, while requests run on this node's ring."""
        if self._lead is not None and self.is_in_use:
            raise generating_with(self._lead.plan.choice.model)

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
        if self.is_draining and self._other_head() is None:
            raise draining()
        if self.rests and self.model is not None:
            raise resting(self.rests)
        with contextlib.ExitStack() as stack:
            lead: Lead | Elsewhere | None = await self._standing(choice)
            if isinstance(lead, Lead):
                stack.enter_context(lead.ring.in_use())
                if choice.standby and not lead.plan.choice.standby:
                    lead.plan, lead.opened = (
                        plan.with_standbys() for plan in (lead.plan, lead.opened)
                    )
                on_plan(lead.plan)
            else:
                await self.until_settled()
                async with self._changing:
                    with self._opened(choice.model, on_progress) as told:
                        lead = await self._find_or_build(
                            choice, tokenizer_for, on_plan, told, on_loaded
                        )
                    if isinstance(lead, Lead):
                        stack.enter_context(lead.ring.in_use())
            yield lead

    @contextlib.contextmanager
    def _opened(self, model: str, on_progress: OnStageProgress) -> Iterator[OnStageProgress]:
        """Keep the progress within the context; yield what takes it, for `on_progress` too."""
        opening = self.opening = Opening(model=model, began_s=time.monotonic())

        def take(rank: int, phase: Phase, done: int, total: int) -> None:
            opening.take(rank, phase, done, total)
            on_progress(rank, phase, done, total)

        try:
            yield take
        finally:
            self.opening = None

    async def lead_instead(
        self, make_plan: Callable[[], Awaitable[Plan]], former: NodeId, epoch: Epoch
    ) -> Lead:
        """Build a ring in the place of that of another head, which is lost.

        Its epoch is `epoch` or later. Raises what planning and building raise.
        """
        async with self._changing:
            self.check_idle()
            self._epoch = max(self._epoch, epoch - 1)
            plan = await make_plan()
            with self._opened(plan.choice.model, lambda *_: None) as told:
                return await self._build(
                    plan, "", told, lambda load_s: None, lambda ring: None, instead_of=former
                )

    async def give_way(self, address: str, epoch: int) -> None:
        """Let the node at `address` lead, whose ring has `epoch`: requests are sent there.

        Rings that this node leads after that have later epochs.
        """
        self._epoch, lead = max(self._epoch, epoch), self._lead
        if lead is None:
            return
        error = SupersededError(f"the node at {address} leads in place of this one")
        error.address = address
        lead.ring.on_broken = lambda ring: False
        lead.ring.give_up(error)
        async with self._changing:
            if self._lead is lead:
                await lead.ring.unload(keep={node.address for node in lead.plan.nodes[1:]})
                await self._forget()

    def elsewhere(self) -> Elsewhere | None:
        """Return the head of the ring that this node is in, None if that is itself or no ring."""
        if self._lead is not None and self._lead.stands:
            return None
        return self._other_head()

    async def unload(self, model: str = "", idle_s: float = 0.0) -> Elsewhere | None:
        """End the ring and free it on every node, or name the head of the ring this node is in.

        Does nothing if the ring has another model than `model`, "" for any. Raises BusyError while
        requests run, if one ended less than `idle_s` seconds ago, and while a model is being loaded
        for one.
        """
        if self._building is not None:
            raise BusyError(
                f"this node is loading {self._building.spec.model}",
                remedy="stop the command that asked for it, or wait until that ends",
            )
        async with self._changing:
            elsewhere = self.elsewhere()
            if elsewhere is not None:
                return elsewhere if model in ("", elsewhere.model) else None
            if self._lead is None:
                await self._host.unload(self._node)
                return None
            if model not in ("", self._lead.plan.choice.model):
                return None
            self.check_idle()
            _check_unused(self._lead.ring, idle_s)
            await self._lead.ring.unload()
            await self._forget()
            return None

    async def close(self) -> None:
        """End the ring within CLOSE_S, even if requests run.

        A ring that is being built is freed by its builder, once the client has gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), self._changing:
                if self._lead is not None:
                    await self._lead.ring.unload()
        await self._forget()

    async def _forget(self) -> None:
        """Drop the ring, which has ended, and end the processes of its tokenizer."""
        lead, self._lead = self._lead, None
        if lead is not None:
            await _close(lead.tokenizer, lead.grammars)

    def ring_broken(
        self,
        ring: str,
        error: ShardnetError,
        silent: NodeId | None = None,
        reporter: NodeId | None = None,
    ) -> None:
        """End `ring`, built or being built, since one of its stages reported it broken.

        `silent` is the node of which the `reporter`, None for this node, heard nothing any more.
        """
        for ours in (self._building, self._lead.ring if self._lead is not None else None):
            if ours is not None and ours.name == ring:
                if silent is not None and ours.broken is None:
                    ours.fell_silent(reporter or self._node, silent, error)
                ours.lost(f"the ring broke: {error}")

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
        elsewhere = self._ring_elsewhere(choice)
        if elsewhere is not None:
            return elsewhere
        self.check_idle()
        await self._planner.provide(
            choice.model,
            lambda done, total: on_progress(0, "downloading", done, total),
            tokenizer_for,
        )
        plan = await self._planner.plan(
            choice, lambda done, total: on_progress(0, "measuring", done, total)
        )
        if isinstance(plan, Elsewhere):
            return plan
        try:
            return await self._build_some(plan, tokenizer_for, on_plan, on_progress, on_loaded)
        except BusyError:
            elsewhere = self._ring_elsewhere(choice)
            if elsewhere is None:
                raise
            return elsewhere

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
        """
        plan, avoided, refusing = opened, dict[NodeId, ShardnetError](), dict[NodeId, str]()
        for n_left in reversed(range(MOST_TRIES)):
            on_plan(plan)
            tried: list[Ring] = []
            try:
                lead = await self._build(plan, tokenizer_for, on_progress, on_loaded, tried.append)
            except (LinkError, PeerFailedError) as error:
                for ring in tried:
                    avoided |= ring.unreached
                    refusing |= {node: why.message for node, why in ring.blamed.items()}
                if not n_left or self._node in refusing:
                    raise
                without = {node: why.message for node, why in avoided.items()} | refusing
                try:
                    plan = await self._planner.replan(opened, plan, without)
                except PlanError:
                    raise error from None
                names = ", ".join(node.name for node in plan.nodes)
                self._log(f"no ring yet: {error}; now over {names}")
            else:
                lead.opened, lead.avoided = opened, avoided
                return lead
        raise AssertionError("the last try returns or raises")

    def _ring_elsewhere(self, choice: ModelChoice) -> Elsewhere | None:
        """Return another head whose ring with this node, built or being built, has the model."""
        elsewhere = self._other_head()
        is_same = elsewhere is not None and elsewhere.model == choice.model
        return elsewhere if is_same and not choice.nodes else None

    async def _standing(self, choice: ModelChoice) -> Lead | None:
        """Return the ring if it is what `choice` asks for and its checkpoint is unchanged."""
        lead = self._lead
        if lead is None or not lead.stands or not lead.suits(choice):
            return None
        if await self._planner.has_changed(lead.plan.facts, choice.model):
            return None
        return lead if self._lead is lead and lead.stands else None

    def _other_head(self) -> Elsewhere | None:
        """Return the head of the ring that this node is a member of, None if that is itself."""
        membership = self._host.membership
        if membership is None or membership.owner == self._node or membership.is_over:
            return None
        return Elsewhere(address=membership.addresses[0], model=membership.model)

    async def _build(
        self,
        plan: Plan,
        tokenizer_for: str,
        on_progress: OnStageProgress,
        on_loaded: Callable[[float], None],
        on_ring: Callable[[Ring], None],
        instead_of: str = "",
    ) -> Lead:
        """Prepare the new ring, free the old one, and build the new one.

        It comes `instead_of` that of another head, "" for none.

        Nodes with which another head builds a ring are waited for, unless that ring would do.
        `on_ring` takes the ring before it is built.
        """
        prepared = await self._builder.prepare(plan)
        if tokenizer_for and prepared.tokenizer is None:
            raise no_tokenizer(plan.facts.path, tokenizer_for)
        try:
            self.check_idle()  # again: who asked for the ring that stands did not wait for this
            if self._lead is not None:
                await self._lead.ring.unload(keep={node.address for node in plan.nodes})
                await self._forget()
            self._epoch += 1
            backoff = BusyBackoff(lambda: self._ring_elsewhere(plan.choice) is not None)
            ring = self._building = prepared.ring(Epoch(self._epoch), backoff.wait)
            ring.instead_of = instead_of
            on_ring(ring)
            on_loaded(await ring.build(on_progress))
        except BaseException:
            await _close(prepared.tokenizer)
            raise
        finally:
            self._building = None
        lead = self._lead = Lead(
            plan=plan,
            ring=ring,
            tokenizer=prepared.tokenizer,
            eos_ids=prepared.eos_ids,
            grammars=None
            if prepared.tokenizer is None
            else Grammars(
                prepared.tokenizer.table, n_ids=ring.spec.vocab_size, eos_ids=prepared.eos_ids
            ),
        )
        self._watch(lead)
        return lead

    # --- another ring in the place of this one

    def leads(self, lead: Lead) -> bool:
        """Say whether `lead` was not ended or replaced by that of another model."""
        return self._lead is lead

    @contextlib.asynccontextmanager
    async def changing(self, lead: Lead) -> AsyncIterator[None]:
        """Keep others from building or unloading rings within the context.

        Raises PeerFailedError if `lead` has ended meanwhile.
        """
        async with self._changing:
            if self._lead is not lead:
                raise PeerFailedError("the ring was unloaded")
            yield

    async def ring_instead(self, lead: Lead, plan: Plan) -> Ring:
        """Prepare the ring of `plan`, to which the requests of `lead` are to go over.

        It is not built. Must be called within `changing`. Raises what preparing raises.
        """
        prepared = await self._builder.prepare(plan, with_tokenizer=False)
        self._epoch += 1
        return prepared.ring(Epoch(self._epoch), give_up, lead.ring)

    async def put_instead(self, lead: Lead, plan: Plan, ring: Ring) -> None:
        """Build a ring that `ring_instead` has prepared; the requests of `lead` go over to it.

        Must be called within `changing`. Raises what building raises; then the lead is as it was.
        """
        self._building = ring
        with self._opened(plan.choice.model, lambda *_: None) as told:
            try:
                await ring.build(told)
            finally:
                self._building = None
        lead.plan, lead.ring = plan, ring
        self._watch(lead)

    async def build_instead(self, lead: Lead, plan: Plan, on_ring: Callable[[Ring], None]) -> None:
        """Build the ring of `plan`, to which the requests of `lead` go over.

        `on_ring` takes the ring before it is built. Must be called within `changing`. Raises what
        preparing or building raises; then the lead is as it was.
        """
        ring = await self.ring_instead(lead, plan)
        on_ring(ring)
        await self.put_instead(lead, plan, ring)

    def _watch(self, lead: Lead) -> None:
        """Have `on_broken` called when the ring of a lead breaks."""
        lead.ring.on_broken = lambda ring: lead.ring is ring and self._on_broken(lead)


async def _nothing() -> None:
    """Wait for nothing."""


def _check_unused(ring: Ring, idle_s: float) -> None:
    """Raise BusyError if a request has used a ring less than `idle_s` seconds ago."""
    if idle_s and ring.broken is None and ring.idle_s < idle_s:
        raise BusyError(
            f"{ring.spec.model} was used {ring.idle_s:.0f} s ago, and is freed after {idle_s:g} s",
            remedy="ask again later",
        )


async def _close(*parts: Tokenizer | Grammars | None) -> None:
    """End the processes of these, off the loop."""
    for part in parts:
        if part is not None:
            await finish(asyncio.to_thread(part.close))
