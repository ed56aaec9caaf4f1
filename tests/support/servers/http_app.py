"""The whole HTTP application over a scripted node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from support.cluster.scripted_node import ScriptedNode, client_of

from shardnet.api.serve.server import application
from shardnet.api.server.endpoint import Endpoint
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings


@dataclass(slots=True, kw_only=True)
class Served:
    """The application and what is behind it."""

    app: ASGIApp
    node: ScriptedNode
    service: Service
    log: list[str] = field(default_factory=list)


@asynccontextmanager
async def served(
    settings: Settings | None = None, added: Sequence[Endpoint[Any]] = ()
) -> AsyncIterator[Served]:
    """Serve a scripted node, also by the `added` endpoints."""
    node = ScriptedNode()
    async with client_of(node) as client:
        settings = settings or Settings()
        names = ModelNames(client, may_switch=settings.may_switch, aliases=settings.aliases)
        service = Service(client=client, settings=settings, models=names)
        try:
            yield Served(app=application(service, added), node=node, service=service)
        finally:
            await service.close()
