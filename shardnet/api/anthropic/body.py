"""The bodies of Anthropic's endpoints.

Unknown fields are passed over; null means left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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
    """Whether the model thinks first. With adaptive it is as the chat template has it."""

    type: Literal["enabled", "disabled", "adaptive"]


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
