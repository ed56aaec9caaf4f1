"""Asks a node what its cluster and its ring do, as long as somebody watches.

Knows how often, and for how long an answer is waited for. What is shown of it is decided by
node_history.py and ring_history.py; nobody is asked twice because two watch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from shardnet.api.client import Client
from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.dashboard.ring_history import RingHistory
from shardnet.errors import ShardnetError
from shardnet.wire.messages.activity import RingActivity
from shardnet.wire.messages.membership import ReportReply

NODES_EVERY_S: Final = 1.0
RING_EVERY_S: Final = 0.5
FRESH_S: Final = 0.25
"""Who looks again so soon gets what was seen before."""
ANSWER_S: Final = 2.0
"""How long nodes may take: one that hangs is silent, the others are shown."""


@dataclass(eq=False, repr=False)
class Watcher:
    """Remembers the node of `client` and its cluster. `clock` is in seconds."""

    client: Client
    _: KW_ONLY
    nodes_every_s: float = NODES_EVERY_S
    ring_every_s: float = RING_EVERY_S
    fresh_s: float = FRESH_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._looked_s = -math.inf
        self.nodes = NodeHistory()
        self.ring = RingHistory()
        self.asked = ""
        self.asked_name = ""
        """Id and name of the node that is asked, "" before it has answered."""
        self.failure = "it was not asked yet"
        """Why the node does not answer, "" while it does."""
        self._head_at = ""
        """The address of the ring's head, "" for the node that is asked."""
        self._n_watching = 0
        self._polling: list[asyncio.Task[None]] = []
        self._looking = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def n_watching(self) -> int:
        """How many watch."""
        return self._n_watching

    @property
    def now_s(self) -> float:
        """The time by its clock."""
        return self.clock()

    def notify(self) -> None:
        """Wake everybody who waits for something new."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def next_change(self) -> asyncio.Event:
        """Return what is set when there is something newer than now."""
        return self._changed

    async def look(self) -> None:
        """Look once, unless somebody watches anyway or has just looked."""
        async with self._looking:
            if not self._polling and self.now_s - self._looked_s >= self.fresh_s:
                await self._look_at_all()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep what is remembered up to date within the context, from its beginning on."""
        self._n_watching += 1
        try:
            async with self._looking:
                if not self._polling:
                    await self._look_at_all()
                    self._polling = [
                        asyncio.create_task(_every(self.nodes_every_s, self._look_at_nodes)),
                        asyncio.create_task(_every(self.ring_every_s, self._look_at_ring)),
                    ]
            yield
        finally:
            self._n_watching -= 1
            if not self._n_watching:
                polling, self._polling = self._polling, []
                for task in polling:
                    task.cancel()
                await asyncio.gather(*polling, return_exceptions=True)

    async def cancel(self, ring: str, sequence: int) -> None:
        """Cancel a request. Raises UsageError for one that has ended."""
        await self.client.cancel(ring, sequence, at=self._head_at)

    async def _look_at_all(self) -> None:
        await self._look_at_nodes()
        await self._look_at_ring()
        self._looked_s = self.now_s

    async def _look_at_nodes(self) -> None:
        replies: list[ReportReply] = []
        failure = ""
        try:
            async with asyncio.timeout(ANSWER_S), self._reports() as answers:
                async for reply in answers:
                    replies.append(reply)
        except ShardnetError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"it did not answer within {ANSWER_S:g} s"
        own = self.nodes.take(replies, self.now_s)
        if own is None:
            self.failure = failure or "it gave no report"
            self.nodes.asked_is_gone(self.now_s)
        else:
            self.failure = ""
            self.asked, self.asked_name = own.node, own.name
            stage = own.report.stage if own.report is not None else None
            if stage is None or not stage.n_stages:
                self._head_at = _other_head(replies, self.nodes)
            else:
                self._head_at = ""  # it knows the way
        self.notify()

    def _reports(self) -> aclosing[AsyncGenerator[ReportReply, None]]:
        return aclosing(self.client.report(with_peers=True))

    async def _look_at_ring(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                activity = await self._activity()
        except (ShardnetError, TimeoutError):
            activity = None
        if activity is not None:
            self.ring.take(activity)
        elif not self.failure:
            self.ring.forget()
        self.notify()

    async def _activity(self) -> RingActivity:
        known, last = self.ring.name, self.ring.last_step
        return await self.client.activity(known_ring=known, after_step=last, at=self._head_at)


def _other_head(replies: list[ReportReply], nodes: NodeHistory) -> str:
    """Return the address of the head of a ring that the asked node is not in, "" without one."""
    stages = [reply.report.stage for reply in replies if reply.report is not None]
    heads = [stage.head for stage in stages if stage is not None and stage.n_stages and stage.head]
    return next(filter(None, map(nodes.address_of, heads)), "")


async def _every(seconds: float, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await look()
