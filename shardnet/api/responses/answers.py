"""Responses and the events of their streams, as OpenAI writes them, made of deltas.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallCut,
    ToolCallDelta,
    ToolCallStarted,
)
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
    """The answer, with what it was asked for. `status` is queued, in_progress, completed,
    incomplete, cancelled or failed.
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


class ResponseQueued(_OfResponse, kw_only=True, tag="response.queued"):
    """Says that the response waits to be made."""


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
    | ResponseQueued
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


class ItemEvents:
    """Divides an answer into items and writes each as events. `new_id` makes ids by a prefix."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.items: list[Item] = []
        """The items so far; the last may be open."""
        self._parts: list[str] = []
        """The text of the open item."""
        self._is_open = False
        self._logprobs: list[ContentLogprob] = []
        """Those of tokens whose text has not come."""

    def take(
        self, delta: OutputDelta, logprobs: Sequence[ContentLogprob] = ()
    ) -> Iterator[StreamEvent]:
        """Yield the events of more of the answer, with those of the tokens that came with it."""
        self._logprobs += logprobs
        match delta:
            case ReasoningDelta(text=text):
                if not self._is_last(ReasoningItem):
                    yield from self._begin(ReasoningItem(id=self._new_id("rs")))
                yield self._more(ThoughtDelta, text)
            case ContentDelta(text=text):
                if not self._is_last(MessageItem):
                    yield from self._begin(MessageItem(id=self._new_id("msg")))
                yield self._more_text(text)
            case ToolCallStarted(call_id=call_id, name=name):
                item = CallItem(id=self._new_id("fc"), call_id=call_id or "", name=name)
                yield from self._begin(item)
            case ToolCallDelta(text=text):
                yield self._more(ArgumentsDelta, text)
            case ToolCallCut():
                yield from self._close("incomplete")

    def wait(self, logprobs: Sequence[ContentLogprob]) -> None:
        """Keep those of tokens whose text has not come."""
        self._logprobs += logprobs

    @property
    def output(self) -> list[Item]:
        """The items of the answer: a call that was cut off is none."""
        return [
            item
            for item in self.items
            if not (isinstance(item, CallItem) and item.status == "incomplete")
        ]

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Yield the events that end the item that is open, if one is. A call is whole by then."""
        yield from self._close("completed" if self._is_last(CallItem) else status)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item, index, text = self.items[-1], self._index, "".join(self._parts)
        item.status = status
        match item:
            case MessageItem(id=item_id, content=[part]):
                part.text = text
                yield TextDone(
                    item_id=item_id, output_index=index, text=text, logprobs=part.logprobs
                )
                yield PartDone(item_id=item_id, output_index=index, part=part)
            case ReasoningItem(id=item_id, content=[thought]):
                thought.text = text
                yield ThoughtDone(item_id=item_id, output_index=index, text=text)
                yield PartDone(item_id=item_id, output_index=index, part=thought)
            case CallItem(id=item_id, name=name):
                item.arguments = text
                yield ArgumentsDone(item_id=item_id, output_index=index, name=name, arguments=text)
        yield ItemDone(output_index=index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _is_last(self, kind: type[Item]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _begin(self, item: Item) -> Iterator[StreamEvent]:
        yield from self.end()
        self.items.append(item)
        self._is_open, self._parts = True, []
        yield ItemAdded(output_index=self._index, item=item)
        match item:
            case MessageItem(id=item_id, content=content):
                content.append(OutputText(text=""))
                yield PartAdded(item_id=item_id, output_index=self._index, part=content[0])
            case ReasoningItem(id=item_id, content=thoughts):
                thoughts.append(ReasoningText(text=""))
                yield PartAdded(item_id=item_id, output_index=self._index, part=thoughts[0])

    def _more_text(self, text: str) -> StreamEvent:
        item = self.items[-1]
        assert isinstance(item, MessageItem)
        self._parts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        item.content[0].logprobs += logprobs
        return TextDelta(item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _more(self, kind: type[ThoughtDelta] | type[ArgumentsDelta], text: str) -> StreamEvent:
        self._parts.append(text)
        self._logprobs = []
        return kind(item_id=self.items[-1].id, output_index=self._index, delta=text)
