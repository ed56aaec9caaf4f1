"""The body of a response request, and the chat request that it means: items become turns.

Unknown fields, items of other types and tools of other types are passed over; null means left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.api.chat.request import (
    ChatRequest,
    ChatTurn,
    Part,
    Tool,
    ToolChoice,
    joined_turns,
    text_of,
    thinking_options,
)
from shardnet.api.openai.chat_body import known_tool, picture_of_url
from shardnet.api.openai.sampling import Count, SamplingBody, options_of, sampling_of
from shardnet.api.server.errors import needed, refused
from shardnet.constraints import Constraint
from shardnet.errors import shown
from shardnet.sampling_params import MAX_LOGPROBS
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

MAX_ITEMS = 1 << 14
MAX_TOOLS = 1024

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item; of the types only text, pictures, reasoning and refusals can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


Parts = Annotated[list[ItemPart], Meta(max_length=MAX_ITEMS)]


class ItemBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of the conversation, with the fields of every type that is read.

    These are message (also without a type), reasoning, function_call, custom_tool_call and the
    outputs of both; item_reference names by its `id` an item of a response that is kept.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | Parts | dict[str, Any] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool. Those of other types than function are passed over."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, kw_only=True):
    """One of the tools that may be called."""

    type: str
    name: str | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """The function that must be called, or with allowed_tools those that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseBody(SamplingBody, kw_only=True):
    """A conversation that is continued. Fields about what no server here keeps are refused if set.

    `input` follows the conversation of `previous_response_id`; with `store`, which is the usual,
    another request may follow this one.
    """

    input: str | Annotated[list[ItemBody], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


LOGPROBS: Final = "message.output_text.logprobs"
"""What a request includes that wants logprobs without others beside the chosen token's."""

_REFUSED: Final = {
    "conversation": "this server keeps no conversations: give previous_response_id",
    "prompt": "this server keeps no prompts: send the text as instructions or input",
}
_READ: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def response_request(
    body: ResponseBody, model: ModelChoice, earlier: Sequence[ItemBody] = ()
) -> ChatRequest:
    """Return the request that a body means; `model` is what the nodes are sent.

    Its input follows the `earlier` items of the conversation.

    Raises HttpError 400, which names the field, for what cannot be done.
    """
    for field, why in _REFUSED.items():
        if getattr(body, field):
            raise refused(f"{field} cannot be used: {why}", field)
    if (body.n or 1) > 1:
        raise refused("a response has one answer: leave n out", "n")
    most = body.max_output_tokens
    settings = options_of(body, body.max_tokens if most is None else most)
    settings["constraint"] = _constraint(body)
    tools, choice, forced = _tools(body)
    return ChatRequest(
        turns=tuple(_turns(body, earlier)),
        model=model,
        sampling=sampling_of(body, _n_logprobs(body)),
        options=settings,
        tools=tools,
        shown_tools=_every_tool(body) if choice == "required" else (),
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_options=thinking_options(body.reasoning.effort if body.reasoning else None),
        thought_budget=body.thought_budget,
        thought_message=body.reasoning_budget_message or "",
    )


def _n_logprobs(body: ResponseBody) -> int | None:
    if body.top_logprobs is None and LOGPROBS not in (body.include or ()):
        return None
    return body.top_logprobs or 0


def _constraint(body: ResponseBody) -> Constraint | None:
    """Return what the answer must match, None for any text."""
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(kind="json")
    if wanted.schema is None:
        raise refused("text.format.schema is missing", "text.format.schema")
    return Constraint.json_schema(wanted.schema, is_strict=bool(wanted.strict))


def _tools(body: ResponseBody) -> tuple[tuple[Tool, ...], ToolChoice, str]:
    """Return the tools, how they are chosen, and the name of the one that must be called."""
    tools, wanted = _every_tool(body), body.tool_choice
    forced = ""
    if isinstance(wanted, ResponseToolChoice) and wanted.type == "allowed_tools":
        tools = tuple(
            known_tool(one.name, tools, "function") for one in wanted.tools or () if one.name
        )
        choice: ToolChoice = wanted.mode or "auto"
    elif isinstance(wanted, ResponseToolChoice):
        if wanted.type != "function":
            raise refused(
                f"tool_choice is of type {shown(wanted.type)}: only functions can be called",
                "tool_choice",
            )
        choice, forced = "required", known_tool(wanted.name, tools, "function").name
    else:
        choice = wanted or "auto"
    if choice == "required" and not tools:
        raise refused("tool_choice is required, but there are no functions", "tool_choice")
    return tools, choice, forced


def _every_tool(body: ResponseBody) -> tuple[Tool, ...]:
    functions = [tool for tool in body.tools or () if tool.type == "function" and tool.name]
    return msgspec.convert(functions, tuple[Tool, ...], from_attributes=True)


def input_items(body: ResponseBody) -> list[ItemBody]:
    """Return the input as items: a text is a message of the user."""
    if isinstance(body.input, str):
        return [ItemBody(role="user", content=body.input)]
    return body.input or []


def _turns(body: ResponseBody, earlier: Sequence[ItemBody]) -> Iterator[ChatTurn]:
    """Yield the turns; that of a request that says nothing is an empty one of the user."""
    turns = [ChatTurn(role="system", content=body.instructions)] if body.instructions else []
    turns += _of_items([*earlier, *input_items(body)], -len(earlier))
    if all(turn.role == "system" for turn in turns):
        turns.append(ChatTurn(role="user"))
    return joined_turns(turns, roles=("system", "user"))


def _of_items(items: Sequence[ItemBody], first: int) -> Iterator[ChatTurn]:
    """Yield a turn for each run of the assistant's items, and for each other item.

    Number 0 is the first of the request's own, counted from `first`.
    """
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    mine: ChatTurn | None = None
    for number, item in enumerate(items, first):
        where = f"input[{number}]"
        more = _assistants(item, where)
        if more is not None:
            names |= {call.id: call.name for call in more.tool_calls}
            mine = more if mine is None else _added(mine, more)
            continue
        turn = _others(item, where, names)
        if turn is None:
            continue
        if mine is not None:
            yield mine
            mine = None
        yield turn
    if mine is not None:
        yield mine


def _assistants(item: ItemBody, where: str) -> ChatTurn | None:
    """Return what an item adds to the assistant's turn, None if it is another's."""
    match item.type:
        case "message" if item.role == "assistant":
            return ChatTurn(role="assistant", content=_text(item.content, f"{where}.content"))
        case "reasoning":
            parts = item.content or item.summary
            field = f"{where}.{'content' if item.content else 'summary'}"
            return ChatTurn(role="assistant", reasoning=_text(parts, field))
        case "function_call" | "custom_tool_call":
            arguments = item.arguments or "{}"
            if item.type == "custom_tool_call":
                arguments = {"input": item.input or ""}
            call = ToolCall(
                id=needed(item.call_id, f"{where}.call_id"),
                name=needed(item.name, f"{where}.name"),
                arguments=_as_text(arguments),
            )
            return ChatTurn(role="assistant", tool_calls=(call,))
        case _:
            return None


def _added(turn: ChatTurn, more: ChatTurn) -> ChatTurn:
    return replace(
        turn,
        content="\n".join(filter(None, (turn.content, more.content))),
        reasoning="\n".join(filter(None, (turn.reasoning, more.reasoning))),
        tool_calls=turn.tool_calls + more.tool_calls,
    )


def _others(item: ItemBody, where: str, names: Mapping[str, str]) -> ChatTurn | None:
    """Return the turn of an item, None for one of a type that is passed over."""
    match item.type:
        case "message":
            role = needed(item.role, f"{where}.role")
            parts = _parts(item.content, f"{where}.content")
            return ChatTurn.of("system" if role == "developer" else role, parts)
        case "function_call_output" | "custom_tool_call_output":
            call_id = needed(item.call_id, f"{where}.call_id")
            output = item.output
            if isinstance(output, dict):
                output = _as_text(output)
            parts = _parts(output, f"{where}.output")
            name = names.get(call_id, "")
            return ChatTurn.of("tool", parts, tool_call_id=call_id, name=name)
        case _:
            return None


def _text(content: str | Sequence[ItemPart] | None, where: str) -> str:
    """Return the text of what the assistant has written."""
    return text_of(_parts(content, where))


def _parts(content: str | Sequence[ItemPart] | None, where: str) -> list[Part]:
    """Return texts and pictures in their order."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    parts: list[Part] = []
    for place, part in enumerate(content):
        field = f"{where}[{place}]"
        if part.type == "input_image":
            if part.file_id and not part.image_url:
                raise refused(f"{field}.file_id cannot be read: give image_url", field)
            parts.append(picture_of_url(part.image_url, f"{field}.image_url", part.detail))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_READ, "refusal") or text is None:
            raise refused(
                f"{field} is of type {shown(part.type)}: only text and input_image are read", field
            )
        parts.append(text)
    return parts


def _as_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
