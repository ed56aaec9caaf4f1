"""The body of a response request.

Unknown fields, items of other types and tools of other types are passed over; null means left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardnet.api.openai.sampling import Count, SamplingBody
from shardnet.sampling_params import MAX_LOGPROBS

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
    outputs of both.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: ToolName | None = None
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


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How hard the model thinks."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: str | None = None


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
    reasoning: ReasoningOptions | None = None
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
