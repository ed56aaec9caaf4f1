"""Messages: the answer, its stream, and how many tokens a conversation has."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from shardnet.api.anthropic.answers import (
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StreamEvent,
)
from shardnet.api.anthropic.blocks import BlockEvents, stopped, tokens_used, whole_blocks
from shardnet.api.anthropic.body import ContinuedBody, ConversationBody
from shardnet.api.anthropic.conversation import continued, counted
from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, Ended, Piece, chat_prompt, run_chat
from shardnet.api.chat_formats.deltas import OutputDelta
from shardnet.api.server.endpoint import Json, Reply, Stream, comment, named_event
from shardnet.api.server.service import Exchange
from shardnet.errors import ContextExceededError


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
    if body.stream:
        chunks = _chunks(exchange, body, request, answer)
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note) + _event(Ping()))
    deltas: list[OutputDelta] = []
    async with aclosing(run_chat(exchange, request, is_streamed=False)) as events:
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
    async with aclosing(run_chat(exchange, request, is_streamed=True)) as events:
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
    messages, options = chat_prompt(counted(body, served.choice))
    try:
        told = await exchange.tokenize(messages, model=served.choice, **options)
    except ContextExceededError as error:
        if not error.n_prompt:
            raise
        return Json(value=TokensCounted(input_tokens=error.n_prompt))
    return Json(value=TokensCounted(input_tokens=len(told.token_ids)))
