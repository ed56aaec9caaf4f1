"""The ASGI application: a route for each endpoint, faults for every other path, CORS if wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardnet import __version__
from shardnet.api.server.endpoint import EVENTS, Dialect, Endpoint, Json, Reply
from shardnet.api.server.errors import refused
from shardnet.api.server.handler import Handler
from shardnet.api.server.service import LEFT_OUT_HEADER, Exchange, Service
from shardnet.api.validation import nearest

PATH: Final = "/openapi.json"


def openapi_endpoint(
    endpoints: Sequence[Endpoint[Any]], dialect: Dialect, root_path: str
) -> Endpoint[None]:
    """Make the endpoint that returns the document."""

    @cache
    def document() -> dict[str, Any]:
        return openapi_document(endpoints, root_path)

    async def answer(exchange: Exchange, body: None) -> Reply:
        return Json(value=document())

    return dialect.at(f"GET {PATH}", "This document", answer, is_open=True)


def openapi_document(endpoints: Sequence[Endpoint[Any]], root_path: str = "") -> dict[str, Any]:
    """Write the document: every endpoint with the schemas of its body, answers and faults."""
    types = list(dict.fromkeys(kind for one in endpoints for kind in _types(one)))
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in endpoints:
        path = re.sub(r":path}", "}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path, of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "shardnet", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(endpoint: Endpoint[Any]) -> list[Any]:
    kinds = [endpoint.body, endpoint.answer, endpoint.chunk, endpoint.dialect.fault_type]
    return [kind for kind in kinds if kind is not None]


def _operation(endpoint: Endpoint[Any], path: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content["application/json"] = {"schema": schemas[endpoint.answer]}
    if endpoint.chunk is not None:
        schema = schemas[endpoint.chunk]
        is_events = endpoint.chunk_type == EVENTS
        content[endpoint.chunk_type] = {"schema": _event_schema(schema) if is_events else schema}
    fault = {"application/json": {"schema": schemas[endpoint.dialect.fault_type]}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "security": [] if endpoint.is_open else [{}, {"key": []}],
        "responses": {
            "200": {"description": "the answer", **({"content": content} if content else {})},
            "default": {"description": "what is wrong", "content": fault},
        },
    }
    if endpoint.body is not None:
        body = {endpoint.body_type: {"schema": schemas[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _event_schema(data: dict[str, Any]) -> dict[str, Any]:
    """Describe an event of a stream whose data is JSON, as OpenAPI 3.2 shows it."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": text},
        "required": ["data"],
    }


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
                allow_origins=[origin.lower().rstrip("/") for origin in settings.cors_origins],
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
            else:
                near = nearest(path[:200], [*methods]) or ";"
                message += f"{near} GET {PATH} lists what there is"
        raise refused(message, status=status, headers=headers)

    return dialect.at("GET /*", "", refuse, is_open=True)


def _below(app: ASGIApp, root_path: str) -> ASGIApp:
    """Let a proxy have the application below `root_path`, whether it strips that or not."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "root_path": root_path}
        await app(scope, receive, send)

    return call
