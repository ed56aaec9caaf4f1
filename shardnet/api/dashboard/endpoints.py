"""The endpoints of the dashboard's data (docs/dashboard.md)."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from shardnet.api.dashboard.board import Dashboard
from shardnet.api.dashboard.jobs import RETRY_S
from shardnet.api.dashboard.models import ClusterModels, cluster_models, list_models
from shardnet.api.dashboard.previews import (
    AllPrograms,
    Findings,
    PlanBody,
    PlanPreview,
    ProgramsBody,
    Text,
    addresses,
    preview,
    program_settings,
)
from shardnet.api.dashboard.ring_history import parse_request_id
from shardnet.api.dashboard.state import ShownJob, ShownState
from shardnet.api.diagnostics import facts_of
from shardnet.api.programs import DEFAULT_CONTEXT, server_address
from shardnet.api.server.endpoint import Dialect, Endpoint, Json, Reply, Stream, comment
from shardnet.api.server.errors import Fault, HttpError, too_many
from shardnet.api.server.service import Exchange
from shardnet.cluster.diagnosis.diagnosis import diagnose
from shardnet.errors import UsageError

PATH: Final = "/dashboard/api"
DOCTOR_S: Final = 10.0
ACCEPTED: Final = 202
MAX_WATCHING: Final = 64
"""Most streams of events at once."""


class ModelBody(msgspec.Struct, kw_only=True):
    """The model that is meant; "" for the default one."""

    model: Text = ""


class PullBody(msgspec.Struct, kw_only=True):
    """The model of the Hub that is meant."""

    model: Text


class Cancelled(msgspec.Struct, kw_only=True):
    """The id of a request that was cancelled."""

    cancelled: str


class Handlers:
    """What the endpoints do."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._working = asyncio.Lock()
        """Held by what has all nodes work, so that pages that are loaded again add no load."""

    async def state(self, exchange: Exchange, body: None) -> Reply:
        """Return everything as it is now."""
        return Json(value=await self._dashboard.state())

    async def events(self, exchange: Exchange, body: None) -> Reply:
        """Stream the state, part by part as it changes."""
        if self._dashboard.watcher.n_watching >= MAX_WATCHING:
            raise too_many(f"{MAX_WATCHING} pages watch already: close one", RETRY_S)
        return Stream(chunks=self._dashboard.events(), heartbeat=lambda: comment(""))

    async def models(self, exchange: Exchange, body: None) -> Reply:
        """List the models of the cluster."""
        service, ring = exchange.service, self._dashboard.watcher.ring
        async with self._working:
            lists = await list_models(service.client)
        found = cluster_models(
            lists,
            served={one.name for one in await service.models.list()},
            default=service.models.default.name,
            loaded=ring.plan.model if ring.plan is not None else "",
        )
        return Json(value=found)

    async def doctor(self, exchange: Exchange, body: None) -> Reply:
        """Diagnose the cluster from the place of the node that is asked."""
        async with self._working:
            facts = await facts_of(exchange.service.client, DOCTOR_S)
        return Json(value=Findings(findings=diagnose(facts)))

    async def plan(self, exchange: Exchange, body: PlanBody) -> Reply:
        """Plan, and load nothing."""
        service, watcher = exchange.service, self._dashboard.watcher
        choice = (await service.models.find(body.model or None)).choice
        if body.nodes or body.leave_out:
            choice = replace(choice, layers=[])  # those of the ring that the server was started for
        if body.nodes:
            if not watcher.asked:
                await watcher.look()
            choice = replace(choice, nodes=addresses(watcher.nodes, body.nodes))
        if body.context:
            choice = replace(choice, context=body.context)
        async with self._working:
            plan = await service.client.plan(choice, without=body.leave_out)
        return Json(value=preview(plan))

    async def programs(self, exchange: Exchange, body: ProgramsBody) -> Reply:
        """Write the settings of programs that are to ask this server."""
        models, ring = exchange.service.models, self._dashboard.watcher.ring
        context = body.context or (ring.plan.context if ring.plan is not None else DEFAULT_CONTEXT)
        return Json(
            value=program_settings(
                server_address(body.url),
                model=body.model or models.default.name,
                key=body.api_key,
                context=context,
            )
        )

    async def load(self, exchange: Exchange, body: ModelBody) -> Reply:
        """Load a model."""
        return Json(value=await self._dashboard.jobs.load(body.model), status=ACCEPTED)

    async def unload(self, exchange: Exchange, body: None) -> Reply:
        """Free the model that is loaded."""
        plan = self._dashboard.watcher.ring.plan
        job = self._dashboard.jobs.unload(plan.model if plan is not None else "")
        return Json(value=job, status=ACCEPTED)

    async def pull(self, exchange: Exchange, body: PullBody) -> Reply:
        """Pull a model from the Hub."""
        return Json(value=self._dashboard.jobs.pull(body.model), status=ACCEPTED)

    async def cancel_job(self, exchange: Exchange, body: None) -> Reply:
        """Cancel a job."""
        return Json(value=await self._dashboard.jobs.cancel(exchange.path_parameters["id"]))

    async def cancel_request(self, exchange: Exchange, body: None) -> Reply:
        """Cancel a request of the ring, whoever sent it."""
        name = exchange.path_parameters["id"]
        try:
            ring, sequence = parse_request_id(name) or ("", 0)
            await self._dashboard.watcher.cancel(ring, sequence)
        except UsageError as error:
            message = f"there is no request '{name[:64]}': it has ended"
            raise HttpError(
                Fault(status=404, kind="invalid_request_error", message=message)
            ) from error
        return Json(value=Cancelled(cancelled=name))


def endpoints(dashboard: Dashboard, dialect: Dialect) -> list[Endpoint[Any]]:
    """List these endpoints; faults are written as `dialect` does."""
    handlers = Handlers(dashboard)

    def get(path: str, summary: str, handle: Any, answer: Any) -> Endpoint[Any]:
        return dialect.at(f"GET {PATH + path}", summary, handle, answer=answer)

    def post(path: str, summary: str, handle: Any, body: Any, answer: Any) -> Endpoint[Any]:
        return dialect.at(f"POST {PATH + path}", summary, handle, body, answer)

    events = get("/events", "The dashboard's state, as it changes", handlers.events, None)
    return [
        get("/state", "The dashboard's state, as it is now", handlers.state, ShownState),
        events,
        get("/models", "The models of the cluster", handlers.models, ClusterModels),
        get("/doctor", "What is wrong with the cluster", handlers.doctor, Findings),
        post("/plan", "What the ring would be", handlers.plan, PlanBody, PlanPreview),
        post("/programs", "Settings for programs", handlers.programs, ProgramsBody, AllPrograms),
        post("/load", "Load a model", handlers.load, ModelBody, ShownJob),
        post("/unload", "Free the model that is loaded", handlers.unload, None, ShownJob),
        post("/pull", "Pull a model from the Hub", handlers.pull, PullBody, ShownJob),
        post("/jobs/{id}/cancel", "Cancel a job", handlers.cancel_job, None, ShownJob),
        post(
            "/requests/{id}/cancel",
            "Cancel a request of the ring",
            handlers.cancel_request,
            None,
            Cancelled,
        ),
    ]
