"""The chat request that a body means.

Knows the defaults of Ollama's options, and how calls and their results belong together without ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from shardnet.api.chat.pictures import Part, TurnPicture
from shardnet.api.chat.request import ChatRequest, ChatTurn, OptionValue, Tool
from shardnet.api.ollama.body import (
    OllamaChat,
    OllamaGenerate,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from shardnet.api.openai.chat_body import picture_bytes
from shardnet.api.requests import GenerationOptions
from shardnet.api.server.errors import refused
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
    tools = tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
        )
        for tool in body.tools or ()
        if tool.type in (None, "function") and tool.function is not None
    )
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
        template_options={**_thinking(body), **_continuing(turns)},
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


def _thinking(body: OllamaRequest) -> dict[str, OptionValue]:
    """Return the options for reasoning by the names that chat templates use."""
    if body.think is None:
        # A form that begins with the first token has no room for reasoning before it.
        return {"enable_thinking": False, "thinking": False} if _has_form(body) else {}
    options: dict[str, OptionValue] = {
        "enable_thinking": bool(body.think),
        "thinking": bool(body.think),
    }
    if isinstance(body.think, str):
        options["reasoning_effort"] = body.think
    return options


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
