"""Empties this node: its layers and what sequences have in them go to other nodes.

Knows what is left to do before a node can end without anybody missing it. Must not know how a ring
is replaced.

A node in another head's ring asks that head to do without it. A node that is a head itself has its
deputy go on, if all its requests are copied there. Without one it cannot give them away, since
their texts are made there: it takes no new ones, and ends with the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.stages import Drain, LeaveRing

LOOK_S: Final = 0.05
"""Interval of the looks at what is left."""


@dataclass(kw_only=True, eq=False, repr=False)
class NodeDrain:
    """Drains one node, once. `link_of` gives the control link to a head, `n_routed` the number of
    requests that this node gives to several rings.

    `hand_over` has the deputy of this head go on; it returns whether that does.
    """

    head: Head
    host: StageHost
    n_routed: Callable[[], int]
    link_of: Callable[[NodeId], ControlLink | None]
    hand_over: Callable[[], Awaitable[bool]]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._refused = ("", "")
        """The ring whose head could not do without this node, and why it was asked to."""
        self._done = asyncio.Event()
        self.is_over = asyncio.Event()
        """Set when a node that was ordered to drain is to end, and who ordered it knows."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the order."""
        handlers.register(Drain, self._drain_for)

    async def _drain_for(self, control: ControlLink, message: Drain) -> None:
        draining = asyncio.ensure_future(self.drain(message.deadline_s))
        try:
            await control.report_until(message.request, draining)
            control.send(Done(request=message.request))
            await control.link.drain()
        finally:  # also where nobody waits for it any more
            draining.add_done_callback(lambda _: self.is_over.set())

    @property
    def is_needed(self) -> bool:
        """Whether requests would miss this node: they run, or their ring is being built."""
        membership = self.host.membership
        is_forming = membership is not None and membership.is_forming
        return self._leads or self.host.is_busy or is_forming

    @property
    def _leads(self) -> bool:
        """Whether requests come to this node: for its own ring, or for others behind it."""
        return self.head.is_in_use or self.n_routed() > 0

    async def drain(self, deadline_s: float) -> None:
        """Take nothing more, and give away what is here; return when that is done.

        After `deadline_s` seconds the node counts as done in any case.
        """
        if self.host.refusals.is_draining:
            await self._done.wait()
            return
        self.host.refusals.is_draining = self.head.is_draining = True
        self.log("draining: this node takes nothing more, and ends when it is empty")
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    await self.leave()
                    if self._leads and await self.hand_over():
                        self.log("the deputy goes on with the requests of this node")
                    if not self.is_needed:
                        break
                    await asyncio.sleep(LOOK_S)
            self.log("drained: no request needs this node any more")
        except TimeoutError:
            self.log(f"the node ends before it is empty: {deadline_s:g} s are over")
        finally:
            self._done.set()

    async def leave(self, why: str = "") -> None:
        """Ask the head of the ring that this node is in, if it is another one, to do without it.

        Where it cannot, its requests are waited for: it is not asked again for that reason. `why`
        is why the node rests, "" if it drains.
        """
        membership = self.host.membership
        if membership is None or membership.is_over or membership.owner == self.head.node:
            return
        if membership.is_forming or self._refused == (membership.ring, why):
            return
        control = self.link_of(NodeId(membership.owner))
        if control is None:  # it is dialled again, or lost
            return
        message = LeaveRing(request=control.next_request(), ring=membership.ring, why=why)
        try:
            await control.ask(message, Done, on_progress=lambda report: None)
        except ShardnetError as error:
            self._refused = (membership.ring, why)
            self.log(f"the ring of {membership.model} cannot do without this node: {error}")
