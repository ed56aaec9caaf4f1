"""How OpenAI writes that something is wrong."""

from __future__ import annotations

import msgspec

from shardnet.api.server.endpoint import Dialect, event
from shardnet.api.server.errors import Fault

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


class Error(msgspec.Struct, kw_only=True):
    """What is wrong. The numbers are those of a prompt that is longer than the context."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The answer of a request that failed."""

    error: Error


def error_answer(fault: Fault) -> ErrorAnswer:
    """Write a fault as an answer."""
    error = Error(
        message=fault.message,
        type=fault.kind,
        param=fault.parameter,
        code=fault.code,
    )
    if fault.n_prompt is not None:  # programs shorten the conversation by these
        error.n_prompt_tokens, error.n_ctx = fault.n_prompt, fault.n_context or 0
    return ErrorAnswer(error=error)


def error_event(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    return event(error_answer(fault)) + DONE


OPENAI = Dialect(
    name="openai", fault=error_answer, fault_in_stream=error_event, fault_type=ErrorAnswer
)
