"""The ASGI application: a route for each endpoint, faults for every other path, CORS if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardnet.api.server.endpoint import Dialect, Endpoint, Reply
from shardnet.api.server.errors import Fault, HttpError
from shardnet.api.server.handler import Handler
from shardnet.api.server.openapi import openapi_endpoint
from shardnet.api.server.service import LEFT_OUT_HEADER, Exchange, Service


def make_app(service: Service, endpoints: Sequence[Endpoint[Any]], dialect: Dialect) -> ASGIApp:
    """Make the application.

    Faults of paths that no endpoint has are written as `dialect` does, but for those below the
    `paths` of the endpoints' own dialects.
    """
    settings = service.settings
    every = [*endpoints, openapi_endpoint(endpoints, dialect, settings.root_path)]
    routes = [Route(one.path, Handler(service, one), methods=[one.method]) for one in every]
    methods: dict[str, str] = {}
    for one in every:
        known = methods.get(one.path)
        methods[one.path] = f"{known}, {one.method}" if known else one.method
    for own in dict.fromkeys(one.dialect for one in endpoints):
        for path in own.paths:
            unknown = Handler(service, _unknown_endpoint(own, methods, path))
            routes += [Route(path, unknown), Route(path + "/{rest:path}", unknown)]
    routes.append(Route("/{rest:path}", Handler(service, _unknown_endpoint(dialect, methods))))
    middleware = []
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", LEFT_OUT_HEADER],
            )
        )
    app = Starlette(routes=routes, middleware=middleware)
    return _below(app, settings.root_path) if settings.root_path else app


def _unknown_endpoint(dialect: Dialect, methods: dict[str, str], below: str = "") -> Endpoint[None]:
    """Make the endpoint of every path `below` another that no other one has."""

    async def refuse(exchange: Exchange, body: None) -> Reply:
        rest = exchange.path_parameters.get("rest")
        path = below if rest is None else f"{below}/{rest}"
        if path in methods:
            known = methods[path].replace(", ", " or ")
            message, status = f"{path[:200]} is asked with {known}", 405
            headers: tuple[tuple[str, str], ...] = (("allow", methods[path]),)
        else:
            message, status, headers = f"there is nothing at {path[:200]}", 404, ()
            if f"/v1{path}" in methods:
                message += f": ask /v1{path}, with a base address that ends with /v1"
        raise HttpError(
            Fault(status=status, kind="invalid_request_error", message=message, headers=headers)
        )

    return Endpoint(
        method="GET", path="/*", summary="", handle=refuse, dialect=dialect, is_open=True
    )


def _below(app: ASGIApp, root_path: str) -> ASGIApp:
    """Let a proxy have the application below `root_path`, whether it strips that or not."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "root_path": root_path}
        await app(scope, receive, send)

    return call
