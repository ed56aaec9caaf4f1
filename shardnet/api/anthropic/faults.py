"""How Anthropic writes that something is wrong."""

from __future__ import annotations

from typing import Final

import msgspec

from shardnet.api.server.endpoint import Dialect, named_event
from shardnet.api.server.errors import Fault

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The type of error by status; other statuses below 500 are of requests that are wrong."""


class WrongRequest(msgspec.Struct, kw_only=True):
    """What is wrong."""

    type: str
    message: str


class FaultAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """The answer of a request that failed, and the event that ends a stream that did."""

    error: WrongRequest


def fault_answer(fault: Fault) -> FaultAnswer:
    """Write a fault as an answer."""
    kind = _KINDS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    message = fault.message
    if fault.n_prompt is not None:  # programs shorten the conversation when they read this
        n_context = fault.n_context or 0
        message = (
            f"prompt is too long: {fault.n_prompt} tokens > {n_context} maximum "
            f"(maximum context length is {n_context} tokens)"
        )
    return FaultAnswer(error=WrongRequest(type=kind, message=message))


def fault_event(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    return named_event("error", fault_answer(fault))


ANTHROPIC: Final = Dialect(
    name="anthropic",
    fault=fault_answer,
    fault_in_stream=fault_event,
    fault_type=FaultAnswer,
    id_headers=("x-request-id", "request-id"),
    paths=("/v1/messages",),
)
