"""Replace a ring that still works: a node leaves it, or one that came makes another plan better.

Knows when to plan again for nodes that came (by policy.py), and the order: the next ring's stages
are loaded while this one goes on; then requests are held for a moment, what they have in KV caches
is moved, and they go on. What cannot be moved is computed again. Must not know how rows travel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead, unless_lost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.recovery.policy import Returns, is_better
from shardnet.cluster.recovery.recovery import Recovery
from shardnet.cluster.ring.ring import Ring
from shardnet.cluster.ring.ring_moves import RingMoves
from shardnet.errors import (
    BusyError,
    CapacityError,
    LinkError,
    PeerFailedError,
    PlanError,
    ShardnetError,
)
from shardnet.transport.loop import at_most, finish
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.stages import LeaveRing
from shardnet.wire.messages.updates import Rearrange, Rearranged

MOST_ROUNDS: Final = 3
"""Rounds of moving ahead: each leaves what was computed during it to the next one."""
SHORT_S: Final = 0.1
"""A round that took less leaves so little that it can be moved while requests are held."""
MOVE_S: Final = 2.0
"""How long requests are held for the rest to be moved; then what is missing is computed again."""
DROP_S: Final = 1.0
"""How long nodes may take to free what they have loaded in vain."""
EXPECTED_S: Final = 0.5
"""How long requests are expected to be held."""


@dataclass(slots=True, kw_only=True)
class PlannedRecord:
    """One replacement of a ring that worked. Times in seconds.

    `ready_s` is how long the next ring's stages took to be ready, while the ring went on; `held_s`
    how long requests stood still. Of `n_requests` those that ran on were `n_moved` with their KV
    cache, of which `n_bytes` went over links.
    """

    why: str
    ready_s: float = 0.0
    held_s: float = 0.0
    n_requests: int = 0
    n_moved: int = 0
    n_bytes: int = 0

    @property
    def words(self) -> str:
        """The line for the log."""
        requests = f"{self.n_requests} request" + "s" * (self.n_requests != 1)
        return (
            f"replaced the ring ({self.why}): ready in {self.ready_s:.2f} s, {requests} held for "
            f"{self.held_s:.2f} s, {self.n_moved} moved with their KV cache "
            f"({self.n_bytes / 2**20:.1f} MiB over links)"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class PlannedChanges:
    """Replaces the ring that `head` leads, for nodes that ask for it and for this one.

    `left_out` returns the nodes that are not to be used for a lead now, and why; `await_node` has
    the requests of one wait so many seconds for a node that leaves and comes back.
    """

    head: Head
    planner: Planner
    left_out: Callable[[Lead], Mapping[NodeId, str]]
    await_node: Callable[[Lead, float], None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.records: deque[PlannedRecord] = deque(maxlen=256)
        """The last replacements, the latest at the end."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what is asked of a head for nodes that leave, or have come back."""
        handlers.register(LeaveRing, self._leave)
        handlers.register(Rearrange, self._rearrange)

    async def _leave(self, control: ControlLink, message: LeaveRing) -> None:
        """Do without a node. Raises as `replace`; then the ring is as it was."""
        lead, peer = self.head.latest, control.link.peer
        if lead is not None and lead.ring.name == message.ring and lead.ring.is_in_use:
            why = f"node {peer.name} leaves"
            work = self.replace(lead, {NodeId(peer.node): message.why or "it is draining"}, why)
            replacing = asyncio.ensure_future(work)
            try:
                await control.report_until(message.request, replacing)
                replacing.result()
            except PlanError as error:
                if not message.returns_s:
                    raise
                self.await_node(lead, message.returns_s)
                self.log(f"requests wait for node {peer.name}, which comes back: {error}")
            finally:
                replacing.cancel()
                await finish(_ended(replacing))
        control.send(Done(request=message.request))

    async def _rearrange(self, control: ControlLink, message: Rearrange) -> None:
        """Use the nodes that are there now, or say how it would be without one of them.

        Raises PlanError if they cannot do it, and as `put`.
        """
        self.head.check_leads()
        lead = self.head.latest
        if lead is None or not lead.stands:
            control.send(Rearranged(request=message.request, nodes=[]))
        else:
            work = self._rearranged(lead, message)
            await control.answer_with(message.request, work)

    async def _rearranged(self, lead: Lead, message: Rearrange) -> Rearranged:
        _check_works(lead)
        gone = {NodeId(message.without): "it leaves"} if message.without else {}
        out = {**self.left_out(lead), **gone}
        known: list[str] = [*self.planner.directory.peers.ready()]
        plan = await self.planner.replan(lead.opened, lead.plan, out, measures=not gone)
        if not gone and _stages(plan) != _stages(lead.plan):
            await self.put(lead, plan, "a node is back")
        return Rearranged(
            request=message.request,
            nodes=[node.node for node in plan.ring_nodes],
            known=known,
        )

    async def replace(self, lead: Lead, without: Mapping[NodeId, str], why: str) -> None:
        """Put another ring in the place of a lead's, without some nodes.

        Nothing happens if it does without them already. Raises PlanError if the others cannot do
        it, and as `put`.
        """
        async with self._replacing(lead):
            if not any(node.node in without for node in lead.plan.ring_nodes):
                return
            out = {**self.left_out(lead), **without}
            planning = self.planner.replan(lead.opened, lead.plan, out)
            plan = await unless_lost(lead.ring, planning)
            former = await self._put(lead, plan, why)
        await former.release({node.address for node in plan.ring_nodes})

    async def put(self, lead: Lead, plan: Plan, why: str) -> None:
        """Put the ring of `plan` in the place of a lead's.

        Raises what loading raises; then the ring goes on as it was. What fails once requests are
        held is a loss of the ring, which is recovered as any other.
        """
        async with self._replacing(lead):
            former = await self._put(lead, plan, why)
        await former.release({node.address for node in plan.ring_nodes})

    @asynccontextmanager
    async def _replacing(self, lead: Lead) -> AsyncIterator[None]:
        """Keep others from changing a ring that works; raises as `_check_works`."""
        async with self.head.led.changing(lead):
            _check_works(lead)
            lead.is_replacing = True
            try:
                yield
            finally:
                lead.is_replacing = False

    async def _put(self, lead: Lead, plan: Plan, why: str) -> Ring:
        """Do that; return the ring that was replaced, whose stages are to be freed."""
        record, began_s = PlannedRecord(why=why), time.monotonic()
        former, ring = lead.ring, await self.head.led.ring_instead(lead, plan)
        moves = RingMoves(former, ring)
        try:
            is_ready = await unless_lost(former, self._make_ready(former, moves))
            record.ready_s = time.monotonic() - began_s
            held_s = time.monotonic()
            await former.engine.hold()
        except BaseException:
            former.engine.release()
            await finish(_drop(moves))
            raise
        await self._switch(lead, plan, ring, moves if is_ready else None, record)
        record.held_s, record.n_bytes = time.monotonic() - held_s, moves.n_bytes
        self.records.append(record)
        self.log(record.words)
        return former

    async def _make_ready(self, former: Ring, moves: RingMoves) -> bool:
        """Have the next stages loaded, and what can be moved brought there, if there is memory."""
        is_ready = await self._prepare(moves)
        if is_ready and former.spec.config.has_movable_slots:
            await self._move_ahead(former, moves)
        return is_ready

    async def _prepare(self, moves: RingMoves) -> bool:
        """Have the next stages loaded beside the present ones; False without memory for both."""
        try:
            await moves.prepare()
        except CapacityError as error:
            self.log(f"the next ring's stages are loaded when this one has ended: {error}")
            await moves.drop()
            return False
        return True

    async def _move_ahead(self, former: Ring, moves: RingMoves) -> None:
        """Move what does not change any more, until little is left."""
        for _ in range(MOST_ROUNDS):
            began_s = time.monotonic()
            await moves.bring(former.engine.to_follow(), is_last=False)
            if time.monotonic() - began_s < SHORT_S:
                return

    async def _switch(
        self, lead: Lead, plan: Plan, ring: Ring, moves: RingMoves | None, record: PlannedRecord
    ) -> None:
        """Move the rest, and go on over the next ring. No step is in flight."""
        former, engine = lead.ring, lead.ring.engine
        computed, moved = engine.computed(), {}
        record.n_requests = engine.n_active
        on_broken, former.on_broken = former.on_broken, lambda _: True
        lead.is_recovering = True
        try:
            if moves is not None:
                try:
                    async with asyncio.timeout(MOVE_S):
                        moved = await moves.bring(computed, is_last=True)
                except TimeoutError:
                    self.log(f"nothing was moved within {MOVE_S:g} s: it is computed again")
            engine.suspend(record.why, EXPECTED_S)
            engine.moved(moved)
            await self.head.led.put_instead(lead, plan, ring)
            record.n_moved = len(moved)
        except BaseException as error:
            lost = error if isinstance(error, ShardnetError) else PeerFailedError(record.why)
            former.on_broken, lead.is_recovering = on_broken, False
            if former.broken is None:
                former.break_(lost)
            elif not on_broken(former):
                engine.fail(lost)
            raise
        lead.is_recovering = False


async def _drop(moves: RingMoves) -> None:
    """Free what was made ready, for as long as that may keep others from building a ring."""
    async with at_most(DROP_S):
        await moves.drop()


def _check_works(lead: Lead) -> None:
    """Raise PeerFailedError if the ring of a lead is lost, or is being replaced."""
    if lead.is_recovering or lead.ring.broken is not None:
        raise PeerFailedError("the ring was lost before it could be replaced", remedy="ask again")


async def _ended(replacing: asyncio.Future[None]) -> None:
    """Wait for the end of a replacement, whose error somebody else gets."""
    await asyncio.wait([replacing])
    if not replacing.cancelled():
        replacing.exception()


LOOK_S: Final = 1.0
"""Interval of the looks at which nodes are here."""
AGAIN_S: Final = 5.0
"""When to plan again for a ring, or with a node, that is in use now."""
MOST_DOUBLED: Final = 4
"""How often that is doubled for such a node: requests wait a moment at each attempt."""


@dataclass(kw_only=True, eq=False, repr=False)
class NodeWatch:
    """Watches the nodes beside `head`; `linked` returns those that are here.

    `replace` puts the ring of a plan in the place of a lead's, for a reason that requests see.
    """

    head: Head
    recovery: Recovery
    replace: Callable[[Lead, Plan, str], Awaitable[None]]
    planner: Planner
    linked: Callable[[], Sequence[NodeId]]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._returns = Returns()
        self._not_before_s = 0.0
        self._said = ""
        self._n_busy = 0
        """How often a node was not to be had, since the last plan was carried out."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Use a node that has come, if it is time to and worth it."""
        now_s = time.monotonic()
        lead = self.head.latest
        left_out = self.recovery.left_out(lead) if lead is not None else {}
        asleep = [info.node for info in self.planner.sleepers.listed()]
        self._returns.look(now_s, [node for node in self.linked() if node not in left_out], asleep)
        if lead is None or lead.is_recovering or now_s < self._not_before_s:
            return
        used = [NodeId(node.node) for node in lead.plan.ring_nodes] if lead.stands else []
        if not self._returns.is_news(now_s, used):
            return
        try:
            if lead.stands:
                await self._consider(lead)
            else:
                self._returns.planned(now_s)
                if lead.is_given_up:
                    await self._open_again(lead)
        except ShardnetError as error:
            # until another head lets go of a node, or one that was lost meanwhile is left out
            if isinstance(error, BusyError | LinkError):
                self._put_off(now_s)
            else:
                self._returns.planned(now_s)
            if self._said != (said := f"the ring stays without the nodes that came: {error}"):
                self._said = said
                self.log(said)

    async def _consider(self, lead: Lead) -> None:
        """Plan with the nodes that came; replace the ring if that gains enough."""
        opened, now = lead.opened, lead.plan
        now_s = time.monotonic()
        n_named = len(opened.choice.nodes)
        if n_named and len(now.ring_nodes) == n_named:
            self._returns.planned(now_s)
            return
        without = dict.fromkeys(self._returns.unsettled(now_s), "it has come just now")
        without |= self.recovery.left_out(lead)
        is_used = lead.ring.is_in_use
        plan = await self.planner.replan(opened, now, without, measures=not is_used)
        if lead is not self.head.latest or lead.plan is not now or lead.is_recovering:
            return  # it was replaced meanwhile
        unheard = [out.node for out in plan.silent]
        is_other = _stages(plan) != _stages(now)
        tok_s = now.placement.predicted_tok_s, plan.placement.predicted_tok_s
        is_complete = bool(n_named) and len(plan.ring_nodes) == n_named
        if is_other and is_better(*tok_s, is_complete=is_complete, is_used=lead.ring.is_in_use):
            before = {node.node for node in now.ring_nodes}
            came = [node.name for node in plan.ring_nodes if node.node not in before]
            await self.replace(lead, plan, f"{', '.join(came) or 'another order'} joins")
            self._returns.planned(now_s, unheard)
            self._n_busy = 0
        elif is_other and (is_used or lead.ring.is_in_use):
            self._not_before_s = now_s + AGAIN_S
        else:
            self._returns.planned(now_s, unheard)
            if self._returns.is_news(now_s, [NodeId(node.node) for node in now.ring_nodes]):
                self._put_off(now_s)  # a link to it broke, or it is too busy to answer

    def _put_off(self, now_s: float) -> None:
        """Plan again later, each time in turn twice as much later."""
        self._not_before_s = now_s + AGAIN_S * 2**self._n_busy
        self._n_busy = min(self._n_busy + 1, MOST_DOUBLED)

    async def _open_again(self, lead: Lead) -> None:
        """Have the ring that was given up built again, for requests to come."""
        choice = lead.opened.choice
        async with self.head.lead(
            choice, on_plan=lambda plan: None, on_progress=lambda *_: None
        ) as found:
            if isinstance(found, Lead):
                names = ", ".join(node.name for node in found.plan.nodes)
                self.log(f"{choice.model} is served again, over {names}")


def _stages(plan: Plan) -> list[tuple[str, int, int]]:
    return [
        (node, stage.layers.start, stage.layers.end)
        for stage in plan.placement.stages
        for node in (stage.node, *stage.shards)
    ]
