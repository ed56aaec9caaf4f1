"""The dashboard of one server: what its nodes are asked while somebody watches, and its events.

What is shown of it is decided by node_history.py and ring_history.py; nobody is asked twice because
two watch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from msgspec.structs import replace

from shardnet import __version__
from shardnet.api.client import Client
from shardnet.api.dashboard.jobs import Jobs
from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.dashboard.ring_history import RingHistory
from shardnet.api.dashboard.state import (
    ShownJob,
    ShownLoading,
    ShownNode,
    ShownRequest,
    ShownRing,
    ShownServer,
    ShownState,
    ShownSteps,
    ShownUsage,
)
from shardnet.api.server.endpoint import named_event
from shardnet.api.server.service import Service
from shardnet.errors import ShardnetError
from shardnet.transport.loop import cancel_all
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
        self.n_watching = 0
        """How many watch."""
        self._polling: list[asyncio.Task[None]] = []
        self._looking = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set when there is something newer than now."""

    def notify(self) -> None:
        """Wake everybody who waits for something new."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def look(self) -> None:
        """Look once, unless somebody watches anyway or has just looked."""
        async with self._looking:
            if not self._polling and self.clock() - self._looked_s >= self.fresh_s:
                await self._look_at_all()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep what is remembered up to date within the context, from its beginning on."""
        self.n_watching += 1
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
            self.n_watching -= 1
            if not self.n_watching:
                polling, self._polling = self._polling, []
                await cancel_all(*polling)

    async def cancel(self, ring: str, sequence: int) -> None:
        """Cancel a request. Raises UsageError for one that has ended."""
        await self.client.cancel(ring, sequence, at=self._head_at)

    async def _look_at_all(self) -> None:
        await self._look_at_nodes()
        await self._look_at_ring()
        self._looked_s = self.clock()

    async def _look_at_nodes(self) -> None:
        replies, failure = await self.client.reports(ANSWER_S)
        own = self.nodes.take(replies, self.clock())
        if own is None:
            self.failure = failure or "it gave no report"
            self.nodes.asked_is_gone(self.clock())
        else:
            self.failure = ""
            self.asked, self.asked_name = own.node, own.name
            stage = own.report.stage if own.report is not None else None
            if stage is None or not stage.n_stages:
                self._head_at = _other_head(replies, self.nodes)
            else:
                self._head_at = ""  # it knows the way
        self.notify()

    async def _look_at_ring(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                known, last = self.ring.name, self.ring.last_step
                activity = await self.client.activity(
                    known_ring=known, after_step=last, at=self._head_at
                )
        except (ShardnetError, TimeoutError):
            if not self.failure:
                self.ring.forget()
        else:
            self.ring.take(activity)
        self.notify()


def _other_head(replies: list[ReportReply], nodes: NodeHistory) -> str:
    """Return the address of the head of a ring that the asked node is not in, "" without one."""
    stages = [reply.report.stage for reply in replies if reply.report is not None]
    heads = [stage.head for stage in stages if stage is not None and stage.n_stages and stage.head]
    return next(filter(None, map(nodes.address_of, heads)), "")


async def _every(seconds: float, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await look()


_MEMORY_STEP: Final = 64 << 20
"""Memory that has changed by less is no news."""


class Dashboard:
    """Shows and acts for one server."""

    def __init__(self, service: Service, *, watcher: Watcher | None = None) -> None:
        self._service = service
        self._began_s = time.monotonic()
        self.watcher = watcher or Watcher(service.client)
        self.jobs = Jobs(service, self.watcher.notify)

    async def state(self) -> ShownState:
        """Return everything as it is now."""
        await self.watcher.look()
        parts = {name: value for name, value, _ in self._parts()}
        return ShownState(**parts, steps=self.watcher.ring.steps())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for each part of the state, then one for each part that has changed."""
        told: dict[str, object] = {}
        steps = ShownSteps()
        async with self.watcher.watching():
            while True:
                changed = self.watcher.changed
                for name, value, essence in self._parts():
                    if name not in told or told[name] != essence:
                        told[name] = essence
                        yield named_event(name, value)
                after = steps.steps[-1].step if steps.steps else 0
                newer = self.watcher.ring.steps(steps.ring or "", after)
                if newer.steps or newer.ring != steps.ring or "steps" not in told:
                    told["steps"] = None
                    steps = newer
                    yield named_event("steps", newer)
                await changed.wait()

    def _parts(self) -> list[tuple[str, Any, object]]:
        """List each part but the steps: its name, its value, and what of that is news."""
        watcher = self.watcher
        server, nodes = self._server(), watcher.nodes.nodes(watcher.clock())
        ring, requests = watcher.ring.ring(), watcher.ring.requests()
        loading = watcher.ring.loading()
        rates, jobs = watcher.ring.rates(), self.jobs.listed()
        usage = self._usage()
        return [
            ("server", server, replace(server, uptime_s=0)),
            ("nodes", nodes, [_node_news(node) for node in nodes]),
            ("ring", ring, _news(ring)),
            ("loading", loading, _news(loading)),
            ("requests", requests, [*map(_news, requests)]),
            ("usage", usage, usage),
            ("rates", rates, rates),
            ("jobs", jobs, [*map(_news, jobs)]),
        ]

    def _usage(self) -> list[ShownUsage]:
        """List tokens by key and model."""
        metrics, found = self._service.metrics, dict[tuple[str, str], ShownUsage]()
        counters = {
            "n_prompt": metrics.prompt_tokens,
            "n_cached": metrics.cached_tokens,
            "n_generated": metrics.generated_tokens,
        }
        for field, counter in counters.items():
            for sample in (sample for family in counter.collect() for sample in family.samples):
                if sample.name.endswith("_total"):
                    key, model = sample.labels["key"], sample.labels["model"]
                    one = found.setdefault((key, model), ShownUsage(key=key, model=model))
                    setattr(one, field, int(sample.value))
        return [found[place] for place in sorted(found)]

    def _server(self) -> ShownServer:
        service, watcher = self._service, self.watcher
        return ShownServer(
            version=__version__,
            uptime_s=time.monotonic() - self._began_s,
            node=watcher.asked or None,
            name=watcher.asked_name or None,
            answers=not watcher.failure,
            failure=watcher.failure or None,
            model=service.models.default.name,
            active_requests=service.n_active,
            has_keys=bool(service.settings.keys),
        )


def _node_news(node: ShownNode) -> ShownNode:
    """Return what is news of a node: not that time passes, nor what flickers."""
    return replace(
        node,
        since_s=0,
        uptime_s=None,
        memory_bytes=_steps(node.memory_bytes),
        memory_free_bytes=_steps(node.memory_free_bytes),
        links=[replace(link, rtt_ms=_digits(link.rtt_ms)) for link in node.links],
    )


def _news(shown: ShownRing | ShownLoading | ShownRequest | ShownJob | None) -> object:
    """Return what is news of something: not that it grows older."""
    return None if shown is None else replace(shown, age_s=0)


def _steps(n_bytes: int | None) -> int | None:
    return None if n_bytes is None else n_bytes // _MEMORY_STEP


def _digits(value: float | None) -> float | None:
    """Round to one digit: what differs by less is no news."""
    return None if value is None else float(f"{value:.0e}")
