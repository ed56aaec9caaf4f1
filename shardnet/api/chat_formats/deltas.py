"""What a chat model's output consists of, piece by piece: reasoning, content and tool calls.

Knows the pieces and how a parser is fed. Must not know any format, nor HTTP.

How a parser is fed: `Generate` is sent with `keep_special_tokens`, so that special tokens stand in
the text. `feed` is called once for each event of the request, with the event's `token_ids` and
`text`, in order and without joining events: an event has one token, so that a token that marks the
beginning or the end of something is told from the same characters written with other tokens. Text
may lag behind its ids (an incomplete character, the possible start of a stop string): it is taken
when it comes. The FINISHED event's `text` is fed without ids, then `finish` is called. A stop token
has an id and no text. Several ids in one call are accepted: a special token is then taken to be the
first place of the text that reads like it.

The deltas of all calls, joined by kind, do not depend on how ids and text were divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, without the marks around it. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call begins: number `index` of this output, from 0.

    `call_id` is what the model wrote, or None where the format has no ids: the server makes one
    (call_ids.py). `name` is one of the tools that were offered, unless the format names another.
    """

    index: int
    call_id: str | None
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of call `index`: a piece of the text of a JSON object."""

    index: int
    text: str


OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStarted | ToolCallDelta
"""One piece. All pieces of a call follow its ToolCallStarted, before the next call starts."""


class OutputParser(Protocol):
    """Divides the output of one request. It never raises for what a model wrote."""

    def feed(self, token_ids: Sequence[int], text: str) -> list[OutputDelta]:
        """Take the next tokens and the text that they complete; return what is known by now."""

    def finish(self) -> list[OutputDelta]:
        """Return what was held back. To be called once, after the last text."""
