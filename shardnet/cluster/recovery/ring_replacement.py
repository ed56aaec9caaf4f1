"""Replace a ring that still works: because a node leaves it, or another plan is better.

Knows the order: the next ring's stages are loaded while this one goes on; then requests are held
for a moment, what they have in KV caches is moved, and they go on. What cannot be moved is computed
again. Must not know why a ring is replaced, nor how rows travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.led_ring import unless_lost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.ring.ring import Ring
from shardnet.cluster.ring.ring_moves import RingMoves
from shardnet.errors import CapacityError, PeerFailedError, ShardnetError
from shardnet.transport.loop import finish
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.stages import LeaveRing

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
    """One replacement of a ring that worked. Times in seconds, `at_s` counted from 1970.

    `ready_s` is how long the next ring's stages took to be ready, while the ring went on; `held_s`
    how long requests stood still. Of `n_requests` those that ran on were `n_moved` with their KV
    cache, of which `n_bytes` went over links.
    """

    at_s: float
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

    `left_out` returns the nodes that are not to be used for a lead now, and why.
    """

    head: Head
    planner: Planner
    left_out: Callable[[Lead], Mapping[NodeId, str]]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.records: deque[PlannedRecord] = deque(maxlen=256)
        """The last replacements, the latest at the end."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what nodes that leave ask for."""
        handlers.register(LeaveRing, self._leave)

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
            finally:
                replacing.cancel()
                await finish(_ended(replacing))
        control.send(Done(request=message.request))

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
        record, began_s = PlannedRecord(at_s=time.time(), why=why), time.monotonic()
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
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_S):
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
