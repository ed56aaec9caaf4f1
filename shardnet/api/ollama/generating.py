"""Answers chats and generations, line by line or at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from msgspec import UNSET

from shardnet.api.chat.request import (
    ChatRequest,
    ChatTurn,
    OptionValue,
    Part,
    Tool,
    TurnPicture,
    thinking_options,
)
from shardnet.api.chat.run import Accepted, ChatEvent, Ended, Piece
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.events import TokenLogprob
from shardnet.api.ollama.body import (
    AnswerForm,
    OllamaCall,
    OllamaCallMade,
    OllamaChat,
    OllamaGenerate,
    OllamaLine,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    line,
)
from shardnet.api.ollama.models import find_model
from shardnet.api.openai.chat_body import picture_bytes
from shardnet.api.requests import GenerationOptions, added_ids, infill
from shardnet.api.server.endpoint import Json, Reply, Stream
from shardnet.api.server.errors import refused
from shardnet.api.server.model_names import ServedModel
from shardnet.api.server.service import Exchange
from shardnet.api.switching.model_switch import MOST_S, Keep, parse_duration
from shardnet.constraints import Constraint
from shardnet.errors import shown
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.types import MAX_POSITIONS
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

TEMPERATURE: Final = 0.8
TOP_K: Final = 40
TOP_P: Final = 0.9
"""What Ollama draws with where a request does not say."""

_LEAST_TOP_P: Final = 1e-9
"""What a top_p of 0 means: only the most likely token."""


def chat_request(body: OllamaChat, model: ModelChoice) -> ChatRequest:
    """Return the request that a chat means; `model` is what the nodes are sent.

    Raises HttpError 400, which names the field, for what cannot be done.
    """
    functions = [tool.function for tool in body.tools or () if tool.type in (None, "function")]
    given = [*filter(None, functions)]
    tools = msgspec.convert(given, tuple[Tool, ...], from_attributes=True)
    return _request(body, _turns(body.messages or ()), model, tools)


def generate_request(body: OllamaGenerate, model: ModelChoice) -> ChatRequest:
    """Return the request that a generation means, a conversation of one message.

    Raises HttpError 400, which names the field, for what cannot be done.
    """
    for field in ("template", "context"):
        if getattr(body, field):
            raise refused(f"{field} is not implemented: leave it out", field)
    if body.raw and body.system:
        raise refused("a raw prompt is continued as it is: it takes no system", "system")
    turns = [ChatTurn.of("user", [*_pictures(body.images, "images"), body.prompt or ""])]
    if body.system:
        turns.insert(0, ChatTurn(role="system", content=body.system))
    return _request(body, turns, model, ())


def _request(
    body: OllamaRequest, turns: Sequence[ChatTurn], model: ModelChoice, tools: tuple[Tool, ...]
) -> ChatRequest:
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs needs logprobs: true", "top_logprobs")
    options = body.options or OllamaOptions()
    settings = _options(options)
    settings["constraint"] = _constraint(body)
    return ChatRequest(
        turns=tuple(turns),
        model=model,
        sampling=_sampling(options, (body.top_logprobs or 0) if body.logprobs else None),
        options=settings,
        tools=tools,
        template_options={**thinking_options(_thinking(body)), **_continuing(turns)},
        thought_budget=_budget(body.think),
    )


def _sampling(options: OllamaOptions, n_logprobs: int | None) -> SamplingParams:
    is_random = options.seed is None or options.seed == -1
    return SamplingParams(
        temperature=TEMPERATURE if options.temperature is None else options.temperature,
        top_k=TOP_K if options.top_k is None else max(0, int(options.top_k)),
        top_p=TOP_P if options.top_p is None else max(options.top_p, _LEAST_TOP_P),
        min_p=options.min_p or 0.0,
        repetition_penalty=options.repeat_penalty or 1.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=secrets.randbits(63) if is_random else int(options.seed or 0) % 2**64,
        n_logprobs=n_logprobs,
    )


def _options(options: OllamaOptions) -> GenerationOptions:
    most = options.num_predict
    return GenerationOptions(
        max_tokens=MAX_POSITIONS if most is None or most < 1 else int(most),
        stop=[options.stop] if isinstance(options.stop, str) else options.stop or [],
    )


def _has_form(body: OllamaRequest) -> bool:
    """Say whether the answer must match something. The schema {} is one: that of any JSON."""
    return body.format is not None and body.format != ""


def _constraint(body: OllamaRequest) -> Constraint | None:
    """Return what the answer must match, None for any text."""
    if not _has_form(body):
        return None
    if body.format == "json":
        return Constraint(kind="json")
    if not isinstance(body.format, dict):
        raise refused(f"format is {shown(body.format)}: give 'json' or a JSON schema", "format")
    return Constraint.json_schema(body.format, is_strict=False)


def _continuing(turns: Sequence[ChatTurn]) -> dict[str, OptionValue]:
    """Have the model go on with the last message if that is the assistant's."""
    is_begun = bool(turns) and turns[-1].role == "assistant" and not turns[-1].tool_calls
    return {CONTINUES: True} if is_begun else {}


def _thinking(body: OllamaRequest) -> bool | str | None:
    """Return whether the model is to think, or how hard; None leaves it to the chat template."""
    if body.think is None and _has_form(body):
        return False  # a form that begins with the first token has no room for reasoning before it
    think = body.think
    return think if think is None or isinstance(think, bool | str) else True


def _budget(think: bool | int | str | None) -> int | None:
    """Return how many tokens the model may think, None where `think` is no number."""
    return think if isinstance(think, int) and not isinstance(think, bool) else None


def _turns(messages: Sequence[OllamaMessage]) -> list[ChatTurn]:
    """Return the turns. A call without an id gets one, and so does the first result of its tool.

    Some templates show ids, of nine letters or digits; the same call has the same one each time.
    """
    turns: list[ChatTurn] = []
    unanswered: list[ToolCall] = []
    n_calls = 0
    for number, message in enumerate(messages):
        calls = []
        for call in message.tool_calls or ():
            n_calls += 1
            calls.append(
                ToolCall(
                    id=call.id or f"{n_calls:09d}",
                    name=call.function.name,
                    arguments=msgspec.json.encode(call.function.arguments or {}).decode(),
                )
            )
        unanswered += calls
        turns.append(
            ChatTurn.of(
                message.role,
                [*_pictures(message.images, f"messages[{number}].images"), message.content or ""],
                reasoning=message.thinking or "",
                tool_calls=tuple(calls),
                tool_call_id=_answered(message, unanswered),
                name=message.tool_name or "",
            )
        )
    return turns


def _pictures(images: Sequence[Any] | None, field: str) -> list[Part]:
    """Return a message's pictures, which Ollama has before its text."""
    each = enumerate(images or ())
    return [TurnPicture(image=picture_bytes(image, f"{field}[{place}]")) for place, image in each]


def _answered(message: OllamaMessage, unanswered: list[ToolCall]) -> str:
    """Return the id of the call whose result a message is, "" for none, and strike it off."""
    if message.role != "tool":
        return message.tool_call_id or ""
    for call in unanswered:
        is_it = (
            call.id == message.tool_call_id
            if message.tool_call_id
            else message.tool_name in (None, "", call.name)
        )
        if is_it:
            unanswered.remove(call)
            return call.id
    return message.tool_call_id or ""


STREAM_TYPE = "application/x-ndjson"


async def chat(exchange: Exchange, body: OllamaChat) -> Reply:
    """Answer a chat."""
    served = await find_model(exchange.service.models, body.model)
    name = body.model or served.name
    form = AnswerForm(name, exchange.began_s, is_chat=True)
    request = chat_request(body, served.choice)
    exchange.keep = keep_of(body.keep_alive)
    if not body.messages:
        return await _load(exchange, body, served, form)
    return await _reply(exchange, body, form, exchange.chat(request, is_streamed=False))


async def generate(exchange: Exchange, body: OllamaGenerate) -> Reply:
    """Answer a generation."""
    served = await find_model(exchange.service.models, body.model)
    name = body.model or served.name
    form = AnswerForm(name, exchange.began_s, is_chat=False)
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
        events = exchange.chat(request, is_streamed=False)
    return await _reply(exchange, body, form, events)


async def _load(
    exchange: Exchange, body: OllamaRequest, served: ServedModel, form: AnswerForm
) -> Reply:
    """Have the model loaded, as a request that says nothing asks for."""
    if exchange.keep is not None and exchange.keep.seconds == 0:
        await exchange.unload(served.choice)
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
                            if written.logprobs is not UNSET:
                                first = ()
                            yield line(written)
                    if first:  # of a token whose text is held back
                        yield line(form.write(logprobs=first))
                case Ended():
                    for call in calls.end():
                        yield line(form.write(calls=[call]))
                    yield line(form.last(told, time.monotonic()))


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
        return form.last(
            self.end,
            time.monotonic(),
            "".join(self._content),
            thinking="".join(self._thinking),
            calls=[*self._calls, *self._open.end()],
            logprobs=self._logprobs,
        )


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
