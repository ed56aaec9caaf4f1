"""Frees a model that nobody uses: when its time is over, or when this machine needs its memory.

Knows when its time is over. Must not know how a model is freed, nor when memory is short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.router.router import Router
from shardnet.errors import BusyError, ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.generation import Unload

LOOK_S: Final = 5.0
"""Interval of the looks."""


@dataclass(kw_only=True, eq=False, repr=False)
class UnusedModels:
    """Looks after the model of the ring that this node is in.

    A ring that this node leads is freed when no request has used it for `idle_s` seconds, never for
    None. `link_of` gives the link to the head of another ring.
    """

    router: Router
    host: StageHost
    link_of: Callable[[NodeId], ControlLink | None]
    idle_s: float | None
    log: Callable[[str], None]

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Free the model of the ring that this node leads if it is time to."""
        idle_s = self.idle_s
        if idle_s is not None and self.router.idle_s is not None:
            await self.free(idle_s, f"no request used it for {idle_s:g} s")

    async def free(self, idle_s: float, why: str) -> bool:
        """Free the model unless a request has used it within `idle_s`; return whether it was freed.

        The head of another ring is asked to.
        """
        loaded, unused_s = self.host.loaded, self.router.idle_s
        if loaded is None or (unused_s is not None and unused_s < idle_s):
            return False
        try:
            if unused_s is not None:
                await self.router.unload(idle_s=idle_s)
            elif not await self._ask_head(idle_s):
                return False
        except BusyError:
            return False
        except ShardnetError as error:
            self.log(f"warning: {loaded.order.model} could not be freed: {error}")
            return False
        self.log(f"{loaded.order.model} was freed: {why}")
        return True

    async def _ask_head(self, idle_s: float) -> bool:
        """Ask the head of the ring that this node is in to free it; False if there is none.

        Weights of a ring that is over are freed here.
        """
        membership = self.host.membership
        if membership is None or membership.is_over:
            await self.router.unload(idle_s=idle_s)
            return True
        control = self.link_of(NodeId(membership.owner))
        if control is None:
            return False
        await control.ask(Unload(request=control.next_request(), idle_s=idle_s), Done)
        return True
