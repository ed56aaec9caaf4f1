"""Answers and the events of streams, as Anthropic writes them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta


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
