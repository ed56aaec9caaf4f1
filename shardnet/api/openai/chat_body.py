"""The body of a chat completion, and the request that it means.

Knows OpenAI's messages, tools and response formats. Unknown fields are ignored.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta

from shardnet.api.chat.request import (
    ChatRequest,
    ChatTurn,
    Detail,
    Part,
    Tool,
    ToolChoice,
    TurnPicture,
    thinking_options,
)
from shardnet.api.openai.sampling import Count, SamplingBody, options_of, sampling_of
from shardnet.api.server.errors import refused
from shardnet.constraints import Constraint
from shardnet.errors import shown
from shardnet.sampling_params import MAX_LOGPROBS
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.wire.messages.chat import MAX_TEMPLATE_OPTIONS, ToolCall
from shardnet.wire.messages.plans import ModelChoice

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 1024
MAX_GIVEN_OPTIONS = MAX_TEMPLATE_OPTIONS - 4
"""Of the chat template: a request's other fields say up to four more."""

TemplateName = Annotated[str, Meta(max_length=256)]
TemplateValue = (
    bool
    | Annotated[int, Meta(ge=-(2**53), le=2**53)]
    | float
    | Annotated[str, Meta(max_length=4096)]
    | None
)


_ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles that templates know by another name."""


WEB: Final = ("http://", "https://")


class ImageUrl(msgspec.Struct, kw_only=True):
    """Where a picture is: a `data:` URL, or one of the web."""

    url: str | None = None
    detail: str | None = None


class PartBody(msgspec.Struct, kw_only=True):
    """A part of a message's content; of the types only text, pictures and refusals can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call; `arguments` is JSON as text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallBody(msgspec.Struct, kw_only=True):
    """A call that the assistant made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class MessageBody(msgspec.Struct, kw_only=True):
    """One message of the conversation. `function_call` is a call in the old form."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[PartBody], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionBody(msgspec.Struct, kw_only=True):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    """A tool. Those of other types than function are passed over."""

    type: str
    function: FunctionBody | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def name(self) -> str | None:
        """The name of the function."""
        return self.function.name if self.function is not None else None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, or of which one must be."""

    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema of the answer."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of a chat completion.

    `functions` and `function_call` are `tools` and `tool_choice` as OpenAI had them first: what
    they ask for is answered in that form, one call at most.
    """

    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    chat_template_kwargs: (
        Annotated[dict[TemplateName, TemplateValue], Meta(max_length=MAX_GIVEN_OPTIONS)] | None
    ) = None
    functions: Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["auto", "none"] | NamedFunction | None = None

    @property
    def has_old_form(self) -> bool:
        """Whether tools are called functions."""
        return bool(self.functions)


def chat_request(body: ChatBody, model: ModelChoice) -> ChatRequest:
    """Return the request that a body means; `model` is what the nodes are sent.

    Raises HttpError 400, which names the field, for what cannot be done.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs needs logprobs: true", "top_logprobs")
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens
    tools, choice, forced = _tools(body)
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    options = thinking_options(effort, body.chat_template_kwargs)
    if body.continue_final_message:
        if body.messages[-1].role != "assistant" or body.messages[-1].tool_calls:
            field = "continue_final_message"
            raise refused(f"{field} needs a text of the assistant as the last message", field)
        options[CONTINUES] = True
    settings = options_of(body, body.max_tokens if most is None else most)
    settings["constraint"] = _constraint(body)
    return ChatRequest(
        turns=tuple(_turn(message, number) for number, message in enumerate(body.messages)),
        model=model,
        sampling=sampling_of(body, n_logprobs),
        options=settings,
        n=body.n or 1,
        tools=tools,
        shown_tools=_every_tool(body) if choice == "required" else (),
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.has_old_form,
        template_options=options,
        thought_budget=body.thought_budget,
        thought_message=body.reasoning_budget_message or "",
    )


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice, str]:
    """Return the tools, how they are chosen, and the name of the one that must be called."""
    if body.has_old_form and body.tools:
        raise refused("functions are tools in their old form: give one of both", "functions")
    tools = _every_tool(body)
    wanted, forced = body.tool_choice, ""
    if isinstance(body.function_call, NamedFunction):
        name = known_tool(body.function_call.name, tools, "function", "function_call").name
        return tools, "required", name
    if body.has_old_form:
        return tools, body.function_call or "auto", ""
    if isinstance(wanted, NamedTool) and wanted.allowed_tools is not None:
        tools = tuple(known_tool(one.name, tools) for one in wanted.allowed_tools.tools)
        choice: ToolChoice = wanted.allowed_tools.mode
    elif isinstance(wanted, NamedTool):
        choice, forced = "required", known_tool(wanted.name, tools).name
    else:
        choice = wanted or "auto"
    if choice == "required" and not tools:
        raise refused("tool_choice is required, but there are no tools", "tool_choice")
    return tools, choice, forced


def _every_tool(body: ChatBody) -> tuple[Tool, ...]:
    functions = [tool.function for tool in body.tools or () if tool.type == "function"]
    given = [*filter(None, body.functions or functions)]
    return msgspec.convert(given, tuple[Tool, ...], from_attributes=True)


def known_tool(
    name: str | None, tools: Sequence[Tool], kind: str = "tool", field: str = "tool_choice"
) -> Tool:
    """Find the tool that `field` names. Raises HttpError 400, which calls tools `kind`."""
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools)
    known = f"the {kind}s are {shown(names)}" if names else f"there are no {kind}s"
    raise refused(f"{field} names no {kind} of this request: {known}", field)


def _turn(message: MessageBody, number: int) -> ChatTurn:
    calls = message.tool_calls or ()
    if message.function_call is not None:
        calls = [ToolCallBody(function=message.function_call)]
    return ChatTurn.of(
        _ROLES.get(message.role, message.role),
        _parts(message, number) or [message.refusal or ""],
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(
            ToolCall(
                id=call.id or "",
                name=call.function.name,
                arguments=_arguments(call.function.arguments),
            )
            for call in calls
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _parts(message: MessageBody, number: int) -> list[Part]:
    """Return the texts and pictures of a message, [] for none."""
    if not isinstance(message.content, list):
        return [message.content] if message.content else []
    parts: list[Part] = []
    for place, part in enumerate(message.content):
        field = f"messages[{number}].content[{place}]"
        if part.type == "image_url":
            where = part.image_url
            if isinstance(where, ImageUrl):
                parts.append(picture_of_url(where.url, f"{field}.image_url", where.detail))
            else:
                parts.append(picture_of_url(where, f"{field}.image_url"))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise refused(
                f"{field} is of type {shown(part.type)}: only text and image_url are read", field
            )
        parts.append(text)
    return parts


def picture_of_url(url: str | None, where: str, detail: str | None = None) -> TurnPicture:
    """Read a picture by its URL, `data:` or of the web; `where` names the field.

    Raises HttpError 400 for another URL, or one that is no base64.
    """
    size: Detail = "low" if detail == "low" else "high" if detail == "high" else "auto"
    if not url:
        raise refused(f"{where} has no picture", where)
    if url.lower().startswith(WEB):
        return TurnPicture(image=url, detail=size)
    head, comma, body = url.partition(",")
    if not (head.lower().startswith("data:") and comma):
        raise refused(f"{where} is {shown(url[:40])}: give a data: URL with base64", where)
    if head.lower().endswith(";base64"):
        return TurnPicture(image=picture_bytes(body, where), detail=size)
    return TurnPicture(image=unquote_to_bytes(body), detail=size)


def picture_bytes(text: object, where: str) -> bytes:
    """Read the base64 of a picture's file. Raises HttpError 400, which names the field `where`."""
    if not isinstance(text, str):
        raise refused(f"{where} is no base64 text", where)
    if text[:5].lower() == "data:":
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise refused(f"{where} is no base64 of a picture", where) from None


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def _constraint(body: ChatBody) -> Constraint | None:
    """Return what the answer must match, None for any text."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(kind="json")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        field = "response_format.json_schema"
        raise refused(f"{field} has no schema", field)
    is_strict = bool(wanted.json_schema.strict)
    return Constraint.json_schema(wanted.json_schema.schema, is_strict=is_strict)
