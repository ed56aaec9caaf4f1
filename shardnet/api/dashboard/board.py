"""The dashboard of one server: its state as a whole, and as events for open pages.

Knows which part changes how often, and what of it is no change. Must not know HTTP beyond the form
of events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from msgspec.structs import replace

from shardnet import __version__
from shardnet.api.dashboard.jobs import Jobs
from shardnet.api.dashboard.state import (
    ShownJob,
    ShownNode,
    ShownRequest,
    ShownRing,
    ShownServer,
    ShownState,
    ShownSteps,
)
from shardnet.api.dashboard.watcher import Watcher
from shardnet.api.server.endpoint import named_event
from shardnet.api.server.service import Service

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
        watcher = self.watcher
        return ShownState(
            server=self._server(),
            nodes=watcher.nodes.nodes(watcher.now_s),
            ring=watcher.ring.ring(),
            loading=watcher.ring.loading(),
            requests=watcher.ring.requests(),
            rates=watcher.ring.rates(),
            steps=watcher.ring.steps(),
            jobs=self.jobs.listed(),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for each part of the state, then one for each part that has changed."""
        told: dict[str, object] = {}
        steps = ShownSteps()
        async with self.watcher.watching():
            while True:
                changed = self.watcher.next_change()
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
        server, nodes = self._server(), watcher.nodes.nodes(watcher.now_s)
        ring, requests = watcher.ring.ring(), watcher.ring.requests()
        loading = watcher.ring.loading()
        rates, jobs = watcher.ring.rates(), self.jobs.listed()
        return [
            ("server", server, replace(server, uptime_s=0)),
            ("nodes", nodes, [_node_news(node) for node in nodes]),
            ("ring", ring, _ring_news(ring)),
            ("loading", loading, None if loading is None else replace(loading, age_s=0)),
            ("requests", requests, [_request_news(request) for request in requests]),
            ("rates", rates, rates),
            ("jobs", jobs, [_job_news(job) for job in jobs]),
        ]

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


def _ring_news(ring: ShownRing | None) -> object:
    return None if ring is None else replace(ring, age_s=0)


def _request_news(request: ShownRequest) -> ShownRequest:
    return replace(request, age_s=0)


def _job_news(job: ShownJob) -> ShownJob:
    return replace(job, age_s=0)


def _steps(n_bytes: int | None) -> int | None:
    return None if n_bytes is None else n_bytes // _MEMORY_STEP


def _digits(value: float | None) -> float | None:
    """Round to one digit: what differs by less is no news."""
    return None if value is None else float(f"{value:.0e}")
