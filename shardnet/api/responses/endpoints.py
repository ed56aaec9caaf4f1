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
        RESPONSES.at(
            "POST /v1/responses",
            "Continue a conversation of items",
            responses.respond,
            ResponseBody,
            Response,
            chunk=StreamEvent,
            counts=True,
        ),
        RESPONSES.at(
            "GET /v1/responses/{response_id}",
            "A response that is kept",
            responses.show,
            answer=Response,
        ),
        RESPONSES.at(
            "DELETE /v1/responses/{response_id}",
            "Keep a response no longer",
            responses.delete,
            answer=Deleted,
        ),
    ]
