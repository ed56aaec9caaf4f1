"""Answers chats and generations, line by line or at once.

Knows that a call comes whole in one line, and that a line without text keeps a client waiting: an
empty one would end many.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from shardnet.api.chat.pictures import TurnPicture
from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, ChatEvent, Ended, Piece, run_chat
from shardnet.api.chat_formats.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.events import TokenLogprob
from shardnet.api.infilling import added_ids, infill
from shardnet.api.ollama.answers import AnswerForm, OllamaCall, OllamaCallMade, OllamaLine, count
from shardnet.api.ollama.body import OllamaChat, OllamaGenerate, OllamaRequest
from shardnet.api.ollama.conversation import chat_request, generate_request
from shardnet.api.ollama.facts import find_model
from shardnet.api.ollama.faults import line
from shardnet.api.server.endpoint import Json, Reply, Stream
from shardnet.api.server.errors import refused
from shardnet.api.server.model_names import ServedModel
from shardnet.api.server.service import Exchange
from shardnet.api.switching.durations import MOST_S, parse_duration
from shardnet.api.switching.model_switch import Keep

STREAM_TYPE = "application/x-ndjson"


async def chat(exchange: Exchange, body: OllamaChat) -> Reply:
    """Answer a chat."""
    served = await find_model(exchange.service.models, body.model)
    form = AnswerForm(body.model or served.name, is_chat=True)
    request = chat_request(body, served.choice)
    exchange.keep = keep_of(body.keep_alive)
    if not body.messages:
        return await _load(exchange, body, served, form)
    return await _reply(exchange, body, form, run_chat(exchange, request, is_streamed=False))


async def generate(exchange: Exchange, body: OllamaGenerate) -> Reply:
    """Answer a generation."""
    served = await find_model(exchange.service.models, body.model)
    form = AnswerForm(body.model or served.name, is_chat=False)
    request = generate_request(body, served.choice)
    exchange.keep = keep_of(body.keep_alive)
    if not body.prompt:
        return await _load(exchange, body, served, form)
    if body.suffix:
        added = added_ids(await exchange.describe_tokenizer(model=served.choice))
        infilling = infill(body.prompt, body.suffix, added)
        request.options["stop_token_ids"] = infilling.stop_ids
        events = _run_raw(exchange, infilling.prompt, request)
    elif body.raw:
        events = _run_raw(exchange, body.prompt, request)
    else:
        events = run_chat(exchange, request, is_streamed=False)
    return await _reply(exchange, body, form, events)


async def _load(
    exchange: Exchange, body: OllamaRequest, served: ServedModel, form: AnswerForm
) -> Reply:
    """Have the model loaded, as a request that says nothing asks for."""
    if exchange.keep is not None and exchange.keep.seconds == 0:
        await exchange.service.switch.unload(served.choice.model)
        return Json(value=form.write(done_reason="unload"))
    await exchange.use(served.choice)
    return Json(value=form.write(done_reason="load"))


def keep_of(given: float | str | None) -> Keep | None:
    """Return how long a model is to stay loaded by `keep_alive`, None where that says nothing.

    Raises HttpError 400 for what is no duration.
    """
    if given is None or given == "":
        return None
    if isinstance(given, str):
        if given.startswith("-") and given[1:2].isdigit():
            return Keep(None)
        try:
            return Keep(parse_duration(given))
        except ValueError as error:
            raise refused(f"keep_alive: {error}", "keep_alive") from error
    return Keep(None if given < 0 else min(float(given), MOST_S))


async def _reply(
    exchange: Exchange,
    body: OllamaRequest,
    form: AnswerForm,
    events: AsyncGenerator[ChatEvent, None],
) -> Reply:
    if body.stream is not False:
        return Stream(
            chunks=_lines(events, form),
            media_type=STREAM_TYPE,
            heartbeat=lambda: line(form.write()),
        )
    whole = _Whole()
    async with aclosing(events):
        async for told in events:
            if isinstance(told, Piece):
                whole.take(told)
            elif isinstance(told, Ended):
                whole.end = told
    return Json(value=whole.written(form))


async def _lines(
    events: AsyncGenerator[ChatEvent, None], form: AnswerForm
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream."""
    calls = _Calls()
    async with aclosing(events):
        async for told in events:
            match told:
                case Accepted():
                    yield b""  # the headers
                case Piece(deltas=deltas, logprobs=logprobs):
                    first: Sequence[TokenLogprob] = logprobs
                    for delta in deltas:
                        for written in _written(calls, delta, first, form):
                            first = ()
                            yield line(written)
                    if first:  # of a token whose text is held back
                        yield line(form.write(logprobs=first))
                case Ended():
                    for call in calls.end():
                        yield line(form.write(calls=[call]))
                    yield line(_last(form.write(done_reason=_reason(told)), told))


def _written(
    calls: _Calls, delta: OutputDelta, logprobs: Sequence[TokenLogprob], form: AnswerForm
) -> list[OllamaLine]:
    ended = [form.write(calls=[call]) for call in calls.take(delta)]
    match delta:
        case ContentDelta(text=text):
            return [*ended, form.write(text, logprobs=logprobs)]
        case ReasoningDelta(text=text):
            return [*ended, form.write(thinking=text, logprobs=logprobs)]
        case _:
            return ended


class _Calls:
    """Puts calls together."""

    def __init__(self) -> None:
        self._begun: ToolCallStarted | None = None
        self._arguments: list[str] = []

    def take(self, delta: OutputDelta) -> list[OllamaCall]:
        """Take the next delta; return the call that ends before it, if one does."""
        if isinstance(delta, ToolCallDelta):
            self._arguments.append(delta.text)
            return []
        ended = self.end()
        if isinstance(delta, ToolCallStarted):
            self._begun = delta
        return ended

    def end(self) -> list[OllamaCall]:
        """Return the call that has begun, if one has."""
        if self._begun is None:
            return []
        begun, text = self._begun, "".join(self._arguments)
        self._begun, self._arguments = None, []
        made = OllamaCallMade(index=begun.index, name=begun.name, arguments=_object(text))
        return [OllamaCall(id=begun.call_id or "", function=made)]


def _object(text: str) -> dict[str, Any]:
    """Read arguments. Those that are no object reach the tool as text: it says what is wrong."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}


class _Whole:
    """An answer that is not streamed, so far."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[OllamaCall] = []
        self._logprobs: list[TokenLogprob] = []
        self._open = _Calls()
        self.end: Ended | None = None

    def take(self, piece: Piece) -> None:
        """Add more."""
        self._logprobs += piece.logprobs
        for delta in piece.deltas:
            self._calls += self._open.take(delta)
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._thinking.append(delta.text)

    def written(self, form: AnswerForm) -> OllamaLine:
        """Write it."""
        assert self.end is not None
        whole = form.write(
            "".join(self._content),
            thinking="".join(self._thinking),
            calls=[*self._calls, *self._open.end()],
            logprobs=self._logprobs,
            done_reason=_reason(self.end),
        )
        return _last(whole, self.end)


def _last(written: OllamaLine, end: Ended) -> OllamaLine:
    count(written, end)
    return written


def _reason(end: Ended) -> str:
    return "length" if end.finish_reason == "length" else "stop"


async def _run_raw(
    exchange: Exchange, prompt: str, request: ChatRequest
) -> AsyncGenerator[ChatEvent, None]:
    """Continue a text, and yield events as those of a chat."""
    parts = request.turns[-1].parts
    options = request.options.copy()
    options["pictures"] = [
        part.image
        for part in parts
        if isinstance(part, TurnPicture) and isinstance(part.image, bytes)
    ]
    events = exchange.generate(prompt, request.sampling, model=request.model, **options)
    is_accepted = False
    async with aclosing(events):
        async for event in events:
            if not is_accepted:
                is_accepted = True
                yield Accepted()
            if event.text or event.logprobs:
                deltas = [ContentDelta(event.text)] if event.text else []
                yield Piece(sample=0, deltas=deltas, logprobs=event.logprobs or ())
            if event.result is not None:
                reason = event.result.finish_reason
                yield Ended(sample=0, finish_reason=reason, result=event.result)
