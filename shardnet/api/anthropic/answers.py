"""Answers and the events of streams, as Anthropic writes them, made of deltas.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from shardnet.api.chat.run import Ended
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStarted,
)


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. There is nothing to sign it with."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool; `input` is a JSON object, as the model wrote it."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class TokensUsed(msgspec.Struct, kw_only=True):
    """Tokens of the prompt that were computed and that were in the KV cache, and generated ones."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: TokensUsed


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    """Begins a stream, with an answer that has nothing yet."""

    message: MessageAnswer


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    """Begins block `index`, which is empty."""

    index: int
    content_block: Block


class MoreText(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More of a text block."""

    text: str


class MoreThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class Signature(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The end of a thinking block."""

    signature: str = ""


class MoreInput(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of the text of a call's input."""

    partial_json: str


More: TypeAlias = MoreText | MoreThinking | Signature | MoreInput


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of block `index`."""

    index: int
    delta: More


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    """Ends block `index`."""

    index: int


class Stopped(msgspec.Struct, kw_only=True):
    """Why an answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    """Says why an answer ended, and what it took in all."""

    delta: Stopped
    usage: TokensUsed


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    """Ends a stream."""


class Ping(msgspec.Struct, kw_only=True, tag_field="type", tag="ping"):
    """Says that the stream goes on."""


StreamEvent: TypeAlias = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


_EMPTY: Final = msgspec.Raw(b"{}")


class BlockEvents:
    """Divides an answer into blocks and writes each as events."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._index = -1

    def take(self, delta: OutputDelta) -> Iterator[StreamEvent]:
        """Yield the events of more of the answer."""
        match delta:
            case ReasoningDelta(text=text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock(thinking=""))
                yield self._more(MoreThinking(thinking=text))
            case ContentDelta(text=text):
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock(text=""))
                yield self._more(MoreText(text=text))
            case ToolCallStarted(call_id=call_id, name=name):
                yield from self._begin(ToolUseBlock(id=call_id or "", name=name, input=_EMPTY))
            case ToolCallDelta(text=text):
                yield self._more(MoreInput(partial_json=text))

    def end(self) -> Iterator[StreamEvent]:
        """Yield the events that end the block that is open, if one is."""
        if isinstance(self._open, ThinkingBlock):
            yield self._more(Signature())
        if self._open is not None:
            yield BlockStop(index=self._index)
        self._open = None

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self.end()
        self._open = block
        self._index += 1
        yield BlockStart(index=self._index, content_block=block)

    def _more(self, more: More) -> StreamEvent:
        return BlockDelta(index=self._index, delta=more)


def whole_blocks(deltas: Sequence[OutputDelta]) -> list[Block]:
    """Return the blocks of a whole answer."""
    blocks: list[Block] = []
    parts: list[str] = []
    events = BlockEvents()
    for event in (*(event for delta in deltas for event in events.take(delta)), *events.end()):
        match event:
            case BlockStart(content_block=block):
                blocks.append(block)
                parts.clear()
            case BlockDelta(delta=more):
                parts.append(_text(more))
            case BlockStop():
                _fill(blocks[-1], "".join(parts))
    return blocks


def _text(more: More) -> str:
    match more:
        case MoreText(text=text) | MoreThinking(thinking=text) | MoreInput(partial_json=text):
            return text
        case Signature(signature=text):
            return text


def _fill(block: Block, text: str) -> None:
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = text
        case ToolUseBlock():
            block.input = _object(text)


def _object(text: str) -> msgspec.Raw:
    """Return the text of a JSON object as it is; an empty object for what is none."""
    try:  # msgspec refuses numbers that other readers take
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else _EMPTY


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def stopped(ended: Ended, stops: Sequence[str], max_tokens: int) -> Stopped:
    """Say why an answer ended. `stops` are the texts that would end it."""
    result = ended.result
    if ended.finish_reason == "tool_calls":
        return Stopped(stop_reason="tool_use", stop_sequence=None)
    if ended.finish_reason == "length":
        is_full = result.usage.n_generated < max_tokens
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
        return Stopped(stop_reason=reason, stop_sequence=None)
    found = next((stop for stop in stops if ends_with(result.tokens, stop)), None)
    if found is None:
        return Stopped(stop_reason="end_turn", stop_sequence=None)
    return Stopped(stop_reason="stop_sequence", stop_sequence=found)


def ends_with(tokens: Sequence[str], stop: str) -> bool:
    """Say whether a text ended tokens, a part of which may be all that the last one has of it.

    Characters that are split over tokens are U+FFFD in these.
    """
    escaped = (re.escape(c) if c.isascii() else f"(?:{c}|\ufffd{{1,4}})" for c in stop)
    last = len("".join(tokens[:-1]))
    return any(found.end() > last for found in re.finditer("".join(escaped), "".join(tokens)))


def tokens_used(ended: Ended | None = None) -> TokensUsed:
    """Say what a request took, nothing before its end."""
    if ended is None:
        return TokensUsed(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
    usage = ended.result.usage
    return TokensUsed(
        input_tokens=usage.n_prompt - usage.n_reused,
        cache_read_input_tokens=usage.n_reused,
        output_tokens=usage.n_generated,
    )
