"""The bodies of Anthropic's endpoints, and the chat request that one means.

Unknown fields are passed over; null means left out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
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
    TurnPicture,
    joined_turns,
    thinking_options,
)
from shardnet.api.openai.chat_body import picture_bytes, picture_of_url
from shardnet.api.requests import GenerationOptions
from shardnet.api.server.errors import needed, refused
from shardnet.constraints import Constraint
from shardnet.errors import shown
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

MAX_MESSAGES = 1 << 14
MAX_BLOCKS = 1 << 14
MAX_TOOLS = 1024

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=4096)]


class ImageSource(msgspec.Struct, kw_only=True):
    """Where a picture is: `data` in base64, or a `url` of the web."""

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A part of the system prompt or of a tool's result: text, in results pictures too."""

    type: str
    text: str | None = None
    source: ImageSource | None = None


Parts = Annotated[list[TextPart], Meta(max_length=MAX_BLOCKS)]


class BlockPart(msgspec.Struct, kw_only=True):
    """A block of a message, with the fields of every type that is read.

    These are text, image, thinking, redacted_thinking (passed over), tool_use and tool_result.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Parts | None = None
    is_error: bool | None = None
    source: ImageSource | None = None


class TurnBody(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockPart], Meta(max_length=MAX_BLOCKS)]


class OfferedTool(msgspec.Struct, kw_only=True):
    """A tool. Those of other types than custom, which servers run, are passed over."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """Which tools must be called; `name` is that of type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, and for how many tokens at most.

    With adaptive it is as the chat template has it.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer must be, and how hard the model thinks."""

    format: OutputFormat | None = None
    effort: Annotated[str, Meta(max_length=64)] | None = None


class ConversationBody(msgspec.Struct, kw_only=True):
    """A conversation whose tokens are counted."""

    messages: Annotated[list[TurnBody], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[str, Meta(max_length=4096)] | None = None
    system: str | Parts | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class ContinuedBody(ConversationBody, kw_only=True):
    """A conversation that is continued."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None


_LEAST_TOP_P: Final = 1e-9
"""What a top_p of 0 means: only the most likely token."""


def continued(body: ContinuedBody, model: ModelChoice) -> ChatRequest:
    """Return the request that continues a conversation; `model` is what the nodes are sent.

    Raises HttpError 400, which names the field, for what cannot be done.
    """
    request = counted(body, model)
    if body.messages[-1].role == "assistant":
        if request.turns[-1].tool_calls:
            last = f"messages[{len(body.messages) - 1}]"
            raise refused(f"{last} calls a tool: send the result", last)
        options_of_template = {**request.template_options, CONTINUES: True}
        request = replace(request, template_options=options_of_template)
    top_p = 1.0 if body.top_p is None else max(body.top_p, _LEAST_TOP_P)
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=top_p,
        seed=secrets.randbits(63),
    )
    options = GenerationOptions(
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        constraint=_constraint(body),
    )
    return replace(request, sampling=sampling, options=options)


def counted(body: ConversationBody, model: ModelChoice) -> ChatRequest:
    """Return the request whose prompt is the conversation.

    Raises HttpError 400, which names the field, for what cannot be read.
    """
    tools = tuple(
        Tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        for tool in body.tools or ()
        if tool.name and _is_custom(tool)
    )
    choice, forced = _tool_choice(body, tools)
    is_one = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
    return ChatRequest(
        turns=tuple(joined_turns(_turns(body), roles=("user",))),
        model=model,
        sampling=SamplingParams(),
        options=GenerationOptions(),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=not is_one,
        template_options=thinking_options(_thinking(body)),
        thought_budget=body.thinking.budget_tokens if body.thinking is not None else None,
    )


def _is_custom(tool: OfferedTool) -> bool:
    return tool.type in (None, "custom")


def _tool_choice(body: ConversationBody, tools: Sequence[Tool]) -> tuple[ToolChoice, str]:
    """Return how tools are chosen, and the name of the one that must be called."""
    wanted = body.tool_choice
    if wanted is None or wanted.type == "auto":
        return "auto", ""
    if wanted.type == "none":
        return "none", ""
    names = [tool.name for tool in tools]
    if wanted.type == "tool":
        if wanted.name not in names:
            known = f"the tools are {shown(', '.join(names))}" if names else "there are no tools"
            field = "tool_choice.name"
            raise refused(f"{field} names no tool of this request: {known}", field)
        return "required", wanted.name or ""
    if not names:
        raise refused("tool_choice is any, but there are no tools", "tool_choice")
    return "required", ""


def _thinking(body: ConversationBody) -> bool | str | None:
    """Return whether the model is to think, or how hard; None leaves it to the chat template."""
    kind = body.thinking.type if body.thinking is not None else None
    effort = body.output_config.effort if body.output_config is not None else None
    if kind == "disabled":
        return False
    return effort if effort is not None else True if kind == "enabled" else None


def _constraint(body: ContinuedBody) -> Constraint | None:
    """Return what the answer must match, None for any text."""
    if body.output_config is None or body.output_config.format is None:
        return None
    return Constraint.json_schema(body.output_config.format.schema, is_strict=False)


def _turns(body: ConversationBody) -> Iterator[ChatTurn]:
    """Yield the turns: the system prompt, then those of each message."""
    system = _system(body.system)
    if system:
        yield ChatTurn(role="system", content=system)
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for number, message in enumerate(body.messages):
        yield from _turns_of(message, f"messages[{number}].content", names)


def _system(system: str | Sequence[TextPart] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(_text(part, f"system[{place}]") for place, part in enumerate(system))


def _turns_of(message: TurnBody, field: str, names: dict[str, str]) -> Iterator[ChatTurn]:
    """Yield the turns of one message: the results of tools are turns of their own."""
    if isinstance(message.content, str):
        yield ChatTurn(role=message.role, content=message.content)
        return
    blocks = [(block, f"{field}[{place}]") for place, block in enumerate(message.content)]
    if message.role == "assistant":
        yield _assistant(blocks, names)
        return
    parts: list[Part] = []
    for block, where in blocks:
        if block.type != "tool_result":
            parts.append(_part(block, where))
            continue
        if parts:
            yield ChatTurn.of(message.role, parts)
            parts = []
        call_id = needed(block.tool_use_id, f"{where}.tool_use_id")
        result, name = _result(block, where), names.get(call_id, "")
        yield ChatTurn.of("tool", result, tool_call_id=call_id, name=name)
    if parts or not blocks:
        yield ChatTurn.of(message.role, parts)


def _assistant(blocks: Sequence[tuple[BlockPart, str]], names: dict[str, str]) -> ChatTurn:
    """Return the turn of an answer, as the model wrote it; note what its calls are called."""
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                call_id = needed(block.id, f"{where}.id")
                name = names[call_id] = needed(block.name, f"{where}.name")
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
            case _:
                texts.append(_text(block, where))
    return ChatTurn(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
    )


def _result(block: BlockPart, where: str) -> list[Part]:
    """Return what a tool gave; templates have no other place for its failure."""
    content = block.content or ""
    parts: list[Part] = [content] if isinstance(content, str) else []
    if not isinstance(content, str):
        each = enumerate(content)
        parts += [_part(part, f"{where}.content[{place}]") for place, part in each]
    if block.is_error and parts and isinstance(parts[0], str):
        parts[0] = f"Error: {parts[0]}"
    elif block.is_error:
        parts.insert(0, "Error: ")
    return parts


def _part(part: TextPart | BlockPart, where: str) -> Part:
    """Return a text or a picture."""
    if part.type != "image":
        return _text(part, where)
    source = part.source
    if source is not None and source.type == "base64":
        return TurnPicture(image=picture_bytes(source.data, f"{where}.source.data"))
    if source is not None and source.type == "url":
        return picture_of_url(source.url, f"{where}.source.url")
    raise refused(f"{where}.source is neither base64 nor url", f"{where}.source")


def _text(part: TextPart | BlockPart, where: str) -> str:
    if part.type != "text" or part.text is None:
        what = "has no text" if part.type == "text" else f"is of type {shown(part.type)}"
        raise refused(f"{where} {what}: only text and images are read", where)
    return part.text
