"""The endpoints of the dashboard's data, previews of plans among them (docs/dashboard.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from shardnet.api.client import Client
from shardnet.api.dashboard.board import Dashboard
from shardnet.api.dashboard.jobs import RETRY_S
from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.dashboard.ring_history import parse_request_id
from shardnet.api.dashboard.state import ShownJob, ShownState
from shardnet.api.diagnostics import facts_of
from shardnet.api.programs import DEFAULT_CONTEXT, KEY_PLACEHOLDER, PROGRAMS, Served, server_address
from shardnet.api.server.endpoint import Dialect, Endpoint, Json, Reply, Stream, comment
from shardnet.api.server.errors import refused, too_many
from shardnet.api.server.service import Exchange
from shardnet.api.switching.household_file import HouseholdEntry
from shardnet.checkpoint.model_names import is_path
from shardnet.cluster.diagnosis.diagnosis import diagnose
from shardnet.cluster.diagnosis.facts import Finding
from shardnet.errors import ShardnetError, UsageError
from shardnet.types import MAX_POSITIONS
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.household import HouseholdModelState
from shardnet.wire.messages.membership import ListedModel, ModelsListed
from shardnet.wire.messages.plans import LeftOut, PlannedStage, PlanReply

NodeIds = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_STAGES)]
Context = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
Text = Annotated[str, Meta(max_length=4096)]


class PlanBody(msgspec.Struct, kw_only=True):
    """Which plan is wanted: ids of nodes that it may not use, or has to, in that order."""

    model: Text = ""
    leave_out: NodeIds = []
    nodes: NodeIds = []
    context: Context = 0


class PlanPreview(msgspec.Struct, kw_only=True):
    """A plan."""

    model: str
    context: int
    dtype: str
    wire_dtype: str
    predicted_tok_s: float | None
    why: str
    warnings: list[str]
    stages: list[PlannedStage]
    left_out: list[LeftOut]


class ProgramsBody(msgspec.Struct, kw_only=True):
    """Where the server is as programs see it, and what they are to ask for."""

    url: Annotated[str, Meta(max_length=2048)]
    model: Text = ""
    api_key: Annotated[str, Meta(max_length=1024)] = ""
    context: Context = 0


class ProgramSettings(msgspec.Struct, kw_only=True):
    """The settings of one program: a text, and where it belongs."""

    name: str
    where: str
    text: str
    note: str | None


class AllPrograms(msgspec.Struct, kw_only=True):
    """The settings of every program."""

    programs: list[ProgramSettings]


class HouseholdBody(HouseholdEntry, kw_only=True):
    """A model that the household is to have."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]


class ShownHousehold(msgspec.Struct, kw_only=True):
    """The models of the household, the most important first."""

    models: list[HouseholdModelState]


class Findings(msgspec.Struct, kw_only=True):
    """All findings, problems first."""

    findings: list[Finding]


def addresses(history: NodeHistory, nodes: list[str]) -> list[str]:
    """Return the addresses of nodes by their ids. Raises HttpError 400 for an unknown one."""
    found = [history.address_of(node) for node in nodes]
    for place, address in enumerate(found):
        if not address:
            raise refused(f"there is no node '{nodes[place][:64]}' now", f"nodes[{place}]")
    return found


def preview(plan: PlanReply) -> PlanPreview:
    """Show a plan."""
    return msgspec.convert(plan, PlanPreview, from_attributes=True)


def program_settings(url: str, *, model: str, key: str, context: int) -> AllPrograms:
    """Write the settings of every program for a server at `url`."""
    served = Served(url=url, key=key or KEY_PLACEHOLDER, model=model, context=context)
    return AllPrograms(
        programs=[
            ProgramSettings(
                name=name,
                where=program.where,
                text=program.write(served),
                note=program.note or None,
            )
            for name, program in PROGRAMS.items()
        ]
    )


LIST_S: Final = 15.0
"""How long nodes may take to open their models."""
MAX_LISTS: Final = 256
"""Most lists that are read, of at most 64 models each."""


class HeldBy(msgspec.Struct, kw_only=True):
    """A node that has a model, and how much of it."""

    node: str
    name: str
    store: str
    held_bytes: int


class ClusterModel(msgspec.Struct, kw_only=True):
    """A model. Those of one name that differ are several."""

    name: str
    is_served: bool
    is_default: bool
    is_loaded: bool
    size_bytes: int
    family: str | None
    form: str | None
    context: int | None
    fits: bool | None
    failure: str | None
    nodes: list[HeldBy]


class SilentNode(msgspec.Struct, kw_only=True):
    """A node that does not say which models it has."""

    node: str
    name: str
    why: str


class ClusterModels(msgspec.Struct, kw_only=True):
    """All models, those that can be used first."""

    models: list[ClusterModel]
    silent: list[SilentNode]


async def list_models(client: Client, model: str) -> list[ModelsListed]:
    """Ask the node and its peers; what does not come within LIST_S is left out.

    A `model` that is a path is listed wherever it lies.

    Raises LinkError when the node does not answer at all.
    """
    lists: list[ModelsListed] = []
    path = model if is_path(model) else ""
    try:
        async with asyncio.timeout(LIST_S), aclosing(client.models(model=path)) as pieces:
            async for piece in pieces:
                lists.append(piece)
                if len(lists) >= MAX_LISTS:
                    break
    except (ShardnetError, TimeoutError):
        if not lists:
            raise
    return lists


def cluster_models(
    lists: Sequence[ModelsListed], *, served: Mapping[str, str], default: str, loaded: str
) -> ClusterModels:
    """Put lists together. `served` are the names by which models may be asked for, by their own
    names; `loaded` is one of the latter or "".
    """
    found: dict[tuple[object, ...], ClusterModel] = {}
    for listed in lists:
        for model in listed.models:
            key = (model.name, model.size_bytes, model.family, model.form, model.failure)
            if key not in found:
                found[key] = _model(model, served, default, loaded)
            found[key].nodes.append(
                HeldBy(
                    node=listed.node,
                    name=listed.name,
                    store=model.store,
                    held_bytes=model.held_bytes,
                )
            )
    return ClusterModels(
        models=sorted(found.values(), key=lambda one: (bool(one.failure), one.name.casefold())),
        silent=[
            SilentNode(node=listed.node, name=listed.name, why=listed.failure)
            for listed in lists
            if listed.failure
        ],
    )


def _model(
    model: ListedModel, served: Mapping[str, str], default: str, loaded: str
) -> ClusterModel:
    is_usable = not model.failure
    name = served.get(model.name, model.name)
    return ClusterModel(
        name=name,
        is_served=is_usable and model.name in served,
        is_default=is_usable and name == default,
        is_loaded=is_usable and model.name == loaded,
        size_bytes=model.size_bytes,
        family=model.family or None,
        form=model.form or None,
        context=model.context or None,
        fits=model.fits,
        failure=model.failure or None,
        nodes=[],
    )


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
            lists = await list_models(service.client, service.models.default.choice.model)
        found = cluster_models(
            lists,
            # A model's own name is listed before those of it with adapters, and its aliases.
            served={one.choice.model: one.name for one in reversed(await service.models.list())},
            default=service.models.default.name,
            loaded=ring.plan.model if ring.plan is not None else "",
        )
        return Json(value=found)

    async def household(self, exchange: Exchange, body: None) -> Reply:
        """List the models that answer side by side."""
        found = await exchange.service.client.household()
        return Json(value=ShownHousehold(models=found))

    async def name_model(self, exchange: Exchange, body: HouseholdBody) -> Reply:
        """Have the household have a model that the nodes have."""
        service = exchange.service
        served = await service.models.find(body.model)
        try:
            named = replace(body, model=served.choice.model).named(body.name)
        except (ValueError, msgspec.ValidationError) as error:
            raise refused(str(error), "model") from error
        await service.client.name_models([named])
        service.models.forget()
        return await self.household(exchange, None)

    async def drop_model(self, exchange: Exchange, body: None) -> Reply:
        """Have a model be no more of the household."""
        service = exchange.service
        await service.client.name_models(dropped=[exchange.path_parameters["name"]])
        service.models.forget()
        return await self.household(exchange, None)

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
            raise refused(message, status=404) from error
        return Json(value=Cancelled(cancelled=name))


def endpoints(dashboard: Dashboard, dialect: Dialect) -> list[Endpoint[Any]]:
    """List these endpoints; faults are written as `dialect` does."""
    handlers, household = Handlers(dashboard), ShownHousehold

    def at(route: str, summary: str, handle: Any, answer: Any = None) -> Endpoint[Any]:
        return dialect.at(route.replace(" ", f" {PATH}"), summary, handle, answer)

    return [
        at("GET /state", "The dashboard's state, as it is now", handlers.state, ShownState),
        at("GET /events", "The dashboard's state, as it changes", handlers.events),
        at("GET /models", "The models of the cluster", handlers.models, ClusterModels),
        at("GET /doctor", "What is wrong with the cluster", handlers.doctor, Findings),
        at("POST /plan", "What the ring would be", handlers.plan, PlanPreview),
        at("POST /programs", "Settings for programs", handlers.programs, AllPrograms),
        at("GET /household", "The models that answer side by side", handlers.household, household),
        at("POST /household", "Name a model", handlers.name_model, household),
        at(
            "DELETE /household/{name:path}",
            "Have a model be no more of the household",
            handlers.drop_model,
            household,
        ),
        at("POST /load", "Load a model", handlers.load, ShownJob),
        at("POST /unload", "Free the model that is loaded", handlers.unload, ShownJob),
        at("POST /pull", "Pull a model from the Hub", handlers.pull, ShownJob),
        at("POST /jobs/{id}/cancel", "Cancel a job", handlers.cancel_job, ShownJob),
        at(
            "POST /requests/{id}/cancel",
            "Cancel a request of the ring",
            handlers.cancel_request,
            Cancelled,
        ),
    ]
