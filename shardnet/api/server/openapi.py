"""The OpenAPI document of a server, made of the types that its bodies are decoded to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec

from shardnet import __version__
from shardnet.api.server.endpoint import EVENTS, Dialect, Endpoint, Json, Reply
from shardnet.api.server.service import Exchange

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

    return Endpoint(
        method="GET",
        path=PATH,
        summary="This document",
        handle=answer,
        dialect=dialect,
        is_open=True,
    )


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
