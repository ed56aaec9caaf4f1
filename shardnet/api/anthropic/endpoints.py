"""The endpoints of Anthropic that there are."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from shardnet.api.anthropic.answers import (
    BlockEvents,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StreamEvent,
    stopped,
    tokens_used,
    whole_blocks,
)
from shardnet.api.anthropic.body import ContinuedBody, ConversationBody, continued, counted
from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, Ended, Piece, count_prompt
from shardnet.api.chat_formats.marks import OutputDelta
from shardnet.api.server.endpoint import (
    Dialect,
    Endpoint,
    Json,
    Reply,
    Stream,
    comment,
    named_event,
)
from shardnet.api.server.errors import Fault
from shardnet.api.server.service import Exchange


class TokensCounted(msgspec.Struct, kw_only=True):
    """How many tokens a conversation has in the model's chat template."""

    input_tokens: int


async def continue_messages(exchange: Exchange, body: ContinuedBody) -> Reply:
    """Answer a conversation."""
    served = await exchange.service.models.find(body.model)
    request = continued(body, served.choice)
    answer = MessageAnswer(
        id=f"msg_{uuid.uuid4().hex}",
        model=served.name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=tokens_used(),
    )
    exchange.go_by(answer.id)
    if body.stream:
        chunks = _chunks(exchange, body, request, answer)
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note) + _event(Ping()))
    deltas: list[OutputDelta] = []
    async with aclosing(exchange.chat(request, is_streamed=False)) as events:
        async for told in events:
            if isinstance(told, Piece):
                deltas += told.deltas
            elif isinstance(told, Ended):
                why = stopped(told, body.stop_sequences or (), body.max_tokens)
                answer.stop_reason, answer.stop_sequence = why.stop_reason, why.stop_sequence
                answer.usage = tokens_used(told)
    answer.content = whole_blocks(deltas)
    return Json(value=answer)


async def _chunks(
    exchange: Exchange, body: ContinuedBody, request: ChatRequest, answer: MessageAnswer
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    blocks = BlockEvents()
    async with aclosing(exchange.chat(request, is_streamed=True)) as events:
        async for told in events:
            match told:
                case Accepted():
                    yield _event(MessageStart(message=answer))
                case Piece(deltas=deltas):
                    for delta in deltas:
                        for event in blocks.take(delta):
                            yield _event(event)
                case Ended():
                    for event in blocks.end():
                        yield _event(event)
                    why = stopped(told, body.stop_sequences or (), body.max_tokens)
                    yield _event(MessageDelta(delta=why, usage=tokens_used(told)))
    yield _event(MessageStop())


def _event(event: StreamEvent) -> bytes:
    return named_event(str(event.__struct_config__.tag), event)


async def count_tokens(exchange: Exchange, body: ConversationBody) -> Reply:
    """Count the tokens of a conversation, one that is longer than the context too."""
    served = await exchange.service.models.find(body.model)
    n_tokens = await count_prompt(exchange, counted(body, served.choice))
    return Json(value=TokensCounted(input_tokens=n_tokens))


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


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    return [
        ANTHROPIC.at(
            "POST /v1/messages",
            "Continue a conversation, in Anthropic's form",
            continue_messages,
            MessageAnswer,
            chunk=StreamEvent,
            counts=True,
        ),
        ANTHROPIC.at(
            "POST /v1/messages/count_tokens",
            "How many tokens a conversation has, in Anthropic's form",
            count_tokens,
            TokensCounted,
            counts=True,
        ),
    ]
