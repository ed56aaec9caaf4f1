"""The endpoints for responses."""

from __future__ import annotations

from typing import Any

from shardnet.api.responses.answers import Response, StreamEvent
from shardnet.api.responses.body import ResponseBody
from shardnet.api.responses.faults import RESPONSES
from shardnet.api.responses.responses import Deleted, Responses
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    responses = Responses()
    return [
        Endpoint(
            method="POST",
            path="/v1/responses",
            summary="Continue a conversation of items",
            handle=responses.respond,
            dialect=RESPONSES,
            body=ResponseBody,
            answer=Response,
            chunk=StreamEvent,
            counts=True,
        ),
        Endpoint(
            method="GET",
            path="/v1/responses/{response_id}",
            summary="A response that is kept",
            handle=responses.show,
            dialect=RESPONSES,
            answer=Response,
        ),
        Endpoint(
            method="DELETE",
            path="/v1/responses/{response_id}",
            summary="Keep a response no longer",
            handle=responses.delete,
            dialect=RESPONSES,
            answer=Deleted,
        ),
    ]
