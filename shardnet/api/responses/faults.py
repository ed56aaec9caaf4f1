"""How a stream of a response writes that something is wrong; answers have OpenAI's usual form."""

from __future__ import annotations

import time
import uuid
from typing import Final

from shardnet.api.openai.faults import ErrorAnswer, error_answer
from shardnet.api.responses.answers import Response, ResponseError, ResponseFailed
from shardnet.api.server.endpoint import Dialect, named_event
from shardnet.api.server.errors import Fault


def failed_event(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    event = ResponseFailed(
        response=Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="failed",
            model="",
            error=ResponseError(code=fault.code or fault.kind, message=fault.message),
        )
    )
    return named_event("response.failed", event)


RESPONSES: Final = Dialect(
    name="responses", fault=error_answer, fault_in_stream=failed_event, fault_type=ErrorAnswer
)
