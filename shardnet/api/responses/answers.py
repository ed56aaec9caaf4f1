"""Responses and the events of their streams, as OpenAI writes them."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from shardnet.api.openai.logprobs import ContentLogprob


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


Part: TypeAlias = OutputText | ReasoningText


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant. `status` is in_progress, completed or incomplete."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning. It is not summed up."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is the text of a JSON object."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item: TypeAlias = MessageItem | ReasoningItem | CallItem


class InputTokens(msgspec.Struct, kw_only=True):
    """Tokens of the prompt whose keys and values were there already."""

    cached_tokens: int


class OutputTokens(msgspec.Struct, kw_only=True):
    """Generated tokens up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """What a response took."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Incomplete(msgspec.Struct, kw_only=True):
    """Why an answer is not whole."""

    reason: str


class ResponseError(msgspec.Struct, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """The answer, with what it was asked for. `status` is in_progress, completed, incomplete or
    failed.
    """

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Any = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event of a stream. They are numbered."""

    sequence_number: int = 0


class _OfResponse(Event, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, kw_only=True, tag="response.created"):
    """Begins a stream."""


class ResponseInProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    """Says that the response is being made."""


class ResponseCompleted(_OfResponse, kw_only=True, tag="response.completed"):
    """Ends a stream, with the whole response."""


class ResponseIncomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    """Ends a stream whose answer was cut off."""


class ResponseFailed(_OfResponse, kw_only=True, tag="response.failed"):
    """Ends a stream that failed."""


class _OfItem(Event, kw_only=True):
    output_index: int
    item: Item


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    """Begins an item."""


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    """Ends an item, which is whole."""


class _OfPart(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    """Begins a part of an item."""

    part: Part


class PartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    """Ends a part of an item."""

    part: Part


class TextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[ContentLogprob] = []


class TextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[ContentLogprob] = []


class ThoughtDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ThoughtDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(Event, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


StreamEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ThoughtDelta
    | ThoughtDone
    | ArgumentsDelta
    | ArgumentsDone
)
