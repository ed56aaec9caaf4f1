"""The endpoint for responses."""

from __future__ import annotations

from typing import Any

from shardnet.api.responses.answers import Response, StreamEvent
from shardnet.api.responses.body import ResponseBody
from shardnet.api.responses.faults import RESPONSES
from shardnet.api.responses.responses import respond
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List this endpoint."""
    return [
        Endpoint(
            method="POST",
            path="/v1/responses",
            summary="Continue a conversation of items",
            handle=respond,
            dialect=RESPONSES,
            body=ResponseBody,
            answer=Response,
            chunk=StreamEvent,
            counts=True,
        )
    ]
