"""Keeps the ring of this node for the head of several, and tells how it is.

Knows when that is over. Must not know how rings are built, nor what their requests are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.member.refusals import draining, resting
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import PeerFailedError
from shardnet.types import NodeId
from shardnet.wire.messages.activity import KeepRing, RingKept
from shardnet.wire.messages.handshake import PeerRole

LOOK_S: Final = 0.25
"""Interval of the looks at the ring."""
TELL_S: Final = 5.0
"""The longest time without a word of it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    keeper: ControlLink
    model: str
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
            if lead is None:
                return
            kept = _Kept(keeper=control, model=lead.plan.choice.model)
            self._kept.add(kept)
            try:
                await self._tell(control, message.request, lead, kept)
            finally:
                self._kept.discard(kept)
        raise PeerFailedError(f"the ring of {self._head.node} is kept no more")

    def keeper(self, model: str) -> NodeId | None:
        """Return the other node that has the ring with `model` kept, None for none."""
        for kept in self._kept:
            peer = kept.keeper.link.peer
            if kept.model == model and peer.role is PeerRole.NODE and not kept.keeper.link.closed:
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
            if not self._head.led.leads(lead) or not lead.stands:
                raise PeerFailedError("the ring was lost")
            now_s = time.monotonic()
            answer = RingKept(
                request=request,
                load=lead.ring.engine.counters,
                is_recovering=lead.is_recovering,
            )
            if answer != told or now_s - told_s >= TELL_S:
                control.send(answer)
                told, told_s = answer, now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await kept.is_over.wait()
