"""Chat completions: the answer, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, Ended, Piece
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallCut,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.events import GenerationResult, TokenLogprob
from shardnet.api.openai.chat_body import ChatBody, chat_request
from shardnet.api.openai.faults import DONE
from shardnet.api.openai.logprobs import (
    Answer,
    ChatLogprobs,
    Timings,
    UsageBody,
    chat_logprobs,
    timings_of,
    usage_of,
)
from shardnet.api.openai.sampling import adapted_by, settle_biases, wants_usage
from shardnet.api.server.endpoint import Json, Reply, Stream, comment, event
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange


class FunctionCall(msgspec.Struct, kw_only=True):
    """A called function, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A call, or in a stream more of call `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class ChatMessageBody(msgspec.Struct, kw_only=True):
    """The message of the assistant. Its reasoning has both names that programs look for."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    refusal: str | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """More of the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


Said = TypeVar("Said", ChatMessageBody, ChatDelta)


class ChatChoice(msgspec.Struct, kw_only=True):
    """One sample of an answer."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChunkChoice(msgspec.Struct, kw_only=True):
    """More of one sample."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(Answer[ChatChoice], kw_only=True):
    """The answer."""

    object: str = "chat.completion"


class ChatChunk(Answer[ChunkChoice], kw_only=True):
    """An event of a stream."""

    object: str = "chat.completion.chunk"


async def complete_chat(exchange: Exchange, body: ChatBody) -> Reply:
    """Answer a chat completion."""
    served = await exchange.service.models.find(body.model)
    await settle_biases(exchange, body, served.choice)
    request = chat_request(body, adapted_by(body, served.choice))
    writer = _Writer(model=served.name, has_old_form=body.has_old_form)
    exchange.go_by(writer.id)
    if body.stream:
        chunks = _chunks(exchange, request, writer, with_usage=wants_usage(body))
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note))
    samples = [_Sample() for _ in range(request.n)]
    async with aclosing(exchange.chat(request, is_streamed=False)) as events:
        async for told in events:
            if isinstance(told, Piece):
                samples[told.sample].take(told)
            elif isinstance(told, Ended):
                samples[told.sample].end = told
    return Json(value=writer.answer(samples, with_logprobs=bool(body.logprobs)))


class ControlBody(msgspec.Struct, kw_only=True):
    """What is done to an answer that is being made: its reasoning is ended.

    `id` is that of the answer, in any form, or the request's X-Request-Id.
    """

    id: str
    action: Literal["reasoning_end"]


class Controlled(msgspec.Struct, kw_only=True):
    """Says that it was done."""

    success: bool = True


async def control_chat(exchange: Exchange, body: ControlBody) -> Reply:
    """Have the model end its reasoning, in llama-server's form. Raises HttpError 404."""
    running = exchange.service.exchanges.get((exchange.owner, body.id))
    if running is None:
        raise refused(f"no request {body.id[:128]} of this key runs at this server", status=404)
    running.end_thought()
    return Json(value=Controlled())


async def _chunks(
    exchange: Exchange, request: ChatRequest, writer: _Writer, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    results: list[GenerationResult] = []
    if with_usage:
        writer.usage = None
    async with aclosing(exchange.chat(request, is_streamed=True)) as events:
        async for told in events:
            match told:
                case Accepted():
                    for sample in range(request.n):
                        yield writer.chunk(sample, ChatDelta(role="assistant", content=""))
                case Piece(sample=sample, deltas=deltas, logprobs=logprobs):
                    first = logprobs or None
                    for delta in deltas:
                        yield writer.chunk(sample, _delta(delta), logprobs=first)
                        first = None
                    if first:  # of a token whose text is held back
                        yield writer.chunk(sample, ChatDelta(), logprobs=first)
                case Ended(sample=sample, result=result):
                    results.append(result)
                    yield writer.chunk(sample, ChatDelta(), end=told)
    if with_usage:
        yield writer.event_of([], usage_of(results))
    yield DONE


def _delta(delta: OutputDelta) -> ChatDelta:
    match delta:
        case ReasoningDelta(text=text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case ContentDelta(text=text):
            return ChatDelta(content=text)
        case ToolCallStarted(index=index, call_id=call_id, name=name):
            function = FunctionCall(name=name, arguments="")
            part = ToolCallPart(index=index, id=call_id or "", type="function", function=function)
            return ChatDelta(tool_calls=[part])
        case ToolCallDelta(index=index, text=text):
            return ChatDelta(
                tool_calls=[ToolCallPart(index=index, function=FunctionCall(arguments=text))]
            )
        case ToolCallCut():
            return ChatDelta()


@dataclass(slots=True)
class _Sample:
    """What one sample of an answer has so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallPart] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Ended | None = None

    def take(self, piece: Piece) -> None:
        """Add more of the sample."""
        self.logprobs += piece.logprobs
        for delta in piece.deltas:
            match delta:
                case ReasoningDelta(text=text):
                    self.reasoning.append(text)
                case ContentDelta(text=text):
                    self.content.append(text)
                case ToolCallStarted(call_id=call_id, name=name):
                    function = FunctionCall(name=name, arguments="")
                    part = ToolCallPart(id=call_id or "", type="function", function=function)
                    self.calls.append(part)
                case ToolCallDelta(text=text):
                    self.calls[-1].function.arguments += text

    def message(self) -> ChatMessageBody:
        """Make the message of it."""
        content = "".join(self.content)
        message = ChatMessageBody(content=None if self.calls and not content else content)
        if self.reasoning:
            message.reasoning_content = message.reasoning = "".join(self.reasoning)
        if self.calls:
            message.tool_calls = self.calls
        return message


class _Writer:
    """Writes what all answers and chunks of one request have in common."""

    def __init__(self, model: str, *, has_old_form: bool) -> None:
        self._has_old_form = has_old_form
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self.usage: UnsetType | None = UNSET
        """What chunks say of the usage before the last one."""

    def chunk(
        self,
        sample: int,
        delta: ChatDelta,
        *,
        logprobs: Sequence[TokenLogprob] | None = None,
        end: Ended | None = None,
    ) -> bytes:
        """Write an event with more of one sample."""
        choice = ChunkChoice(
            index=sample,
            delta=self._formed(delta),
            logprobs=None if logprobs is None else chat_logprobs(logprobs),
            finish_reason=self._reason(end.finish_reason) if end is not None else None,
        )
        timings = timings_of([end.result]) if end is not None else UNSET
        return self.event_of([choice], self.usage, timings)

    def answer(self, samples: Sequence[_Sample], *, with_logprobs: bool) -> ChatCompletion:
        """Make the whole answer."""
        ends = [sample.end for sample in samples if sample.end is not None]
        choices = [
            ChatChoice(
                index=number,
                message=self._formed(sample.message()),
                logprobs=chat_logprobs(sample.logprobs) if with_logprobs else None,
                finish_reason=self._reason(sample.end.finish_reason if sample.end else "stop"),
            )
            for number, sample in enumerate(samples)
        ]
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of(end.result for end in ends),
            timings=timings_of([end.result for end in ends]),
        )

    def _formed(self, said: Said) -> Said:
        """Write a call as the old form has it, if the request has that."""
        if self._has_old_form and said.tool_calls:
            said.function_call, said.tool_calls = said.tool_calls[0].function, UNSET
        return said

    def _reason(self, reason: str) -> str:
        return "function_call" if self._has_old_form and reason == "tool_calls" else reason

    def event_of(
        self,
        choices: list[ChunkChoice],
        usage: UsageBody | UnsetType | None,
        timings: Timings | UnsetType = UNSET,
    ) -> bytes:
        return event(
            ChatChunk(
                id=self.id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                timings=timings,
            )
        )
