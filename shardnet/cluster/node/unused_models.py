"""Frees a model that nobody uses: when its time is over, or this machine runs short of memory.

Knows when that is. Must not know how a model is freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.errors import BusyError, ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.generation import Unload

LOOK_S: Final = 5.0
"""Interval of the looks."""
SHORT_SHARE: Final = 0.03
SHORT_BYTES: Final = (256 << 20, 2 << 30)
"""Memory is short below this share of all of it, but between these two."""
N_SHORT: Final = 3
"""So many looks in a row must find it short: programs that start take memory and give it back."""
SHORT_IDLE_S: Final = 30.0
"""A model that a request has used less than so long ago is not freed for others' sake."""


class ShortMemory:
    """Says when memory is short: little is left, and most of what there was is gone.

    A model that fills a machine on purpose, by --memory, is no shortage. Pure.
    """

    def __init__(self) -> None:
        self._most_bytes = 0
        self._n_short = 0

    def is_short(self, available_bytes: int, total_bytes: int) -> bool:
        """Take the next look at what is available, of all there is."""
        least, most = SHORT_BYTES
        limit = max(least, min(most, int(total_bytes * SHORT_SHARE)))
        self._most_bytes = max(self._most_bytes, available_bytes)
        is_short = available_bytes < min(limit, self._most_bytes // 2)
        self._n_short = self._n_short + 1 if is_short else 0
        return self._n_short >= N_SHORT


class UnusedModels:
    """Looks after the model of the ring that this node is in.

    `memory` returns the bytes that are available on this machine and all there are, None does not
    look. A ring that this node leads is freed too when no request has used it for `idle_s` seconds,
    never for None. `link_of` gives the link to the head of another ring.
    """

    def __init__(
        self,
        *,
        head: Head,
        host: StageHost,
        link_of: Callable[[NodeId], ControlLink | None],
        memory: Callable[[], tuple[int, int]] | None,
        idle_s: float | None,
        log: Callable[[str], None],
    ) -> None:
        self._head = head
        self._host = host
        self._link_of = link_of
        self._memory = memory
        self._idle_s = idle_s
        self._log = log
        self._short = ShortMemory()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Free the model if it is time to."""
        loaded = self._host.loaded
        if loaded is None:
            self._short = ShortMemory()
            return
        is_short = self._memory is not None and self._short.is_short(*self._memory())
        idle_s, unused_s = SHORT_IDLE_S if is_short else self._idle_s, self._head.idle_s
        if idle_s is None or (unused_s is not None and unused_s < idle_s):
            return
        try:
            if unused_s is not None:
                await self._head.unload(idle_s=idle_s)
            elif not is_short or not await self._ask_head(idle_s):
                return
        except BusyError:
            return
        except ShardnetError as error:
            self._log(f"warning: {loaded.order.model} could not be freed: {error}")
            return
        self._short = ShortMemory()
        why = "memory is short" if is_short else f"no request used it for {idle_s:g} s"
        self._log(f"{loaded.order.model} was freed: {why}")

    async def _ask_head(self, idle_s: float) -> bool:
        """Ask the head of the ring that this node is in to free it; False if there is none.

        Weights of a ring that is over are freed here.
        """
        membership = self._host.membership
        if membership is None or membership.is_over:
            await self._head.unload(idle_s=idle_s)
            return True
        control = self._link_of(NodeId(membership.owner))
        if control is None:
            return False
        await control.ask(Unload(request=control.next_request(), idle_s=idle_s), Done)
        return True
