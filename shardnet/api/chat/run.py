"""Runs a chat request and yields what the model writes as deltas, sample by sample.

Knows the client's events and how a parser is fed. Must not know any dialect, nor HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias, Unpack

from shardnet.api.chat.plain_text import PlainText
from shardnet.api.chat.request import ChatRequest, ChatTurn
from shardnet.api.chat_formats.deltas import (
    OutputDelta,
    OutputParser,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.events import GenerationEvent, GenerationResult, TokenLogprob
from shardnet.api.requests import GenerationOptions, Message, Prompts
from shardnet.types import SamplingParams
from shardnet.wire.messages.plans import ModelChoice


class Generator(Protocol):
    """What generates: a client, or what stands before one."""

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Generate as `shardnet.api.Client.generate` does."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The ring has taken the request: no error of its prompt or its parameters comes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """More of one sample: deltas, and the logprobs of the tokens that came with them."""

    sample: int
    deltas: Sequence[OutputDelta]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of one sample: `finish_reason` is stop, length or tool_calls."""

    sample: int
    finish_reason: str
    result: GenerationResult


ChatEvent: TypeAlias = Accepted | Piece | Ended


async def run_chat(
    generator: Generator,
    request: ChatRequest,
    make_parser: Callable[[], OutputParser] = PlainText,
) -> AsyncGenerator[ChatEvent, None]:
    """Run a request and yield its events: Accepted first, then for each sample pieces and its end.

    Closing the iterator cancels the request. Raises the first error of any sample.
    """
    samples = [_Sample(number, make_parser(), request) for number in range(request.n)]
    events = generator.generate(
        [*map(_message, request.turns)],
        request.sampling,
        n=request.n,
        model=request.model,
        **request.options,
    )
    is_accepted = False
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            if not is_accepted:
                is_accepted = True
                yield Accepted()
            for told in samples[event.sample].take(event):
                yield told


class _Sample:
    """The output of one sample on its way through the parser."""

    def __init__(self, number: int, parser: OutputParser, request: ChatRequest) -> None:
        self._number = number
        self._parser = parser
        self._most_calls = None if request.parallel_tool_calls else 1
        self._has_called = False

    def take(self, event: GenerationEvent) -> list[ChatEvent]:
        """Turn an event of this sample into deltas and, at its end, into the end."""
        deltas = self._parser.feed(event.token_ids, event.text)
        if event.result is not None:
            deltas = [*deltas, *self._parser.finish()]
        deltas = [delta for delta in deltas if self._is_wanted(delta)]
        told: list[ChatEvent] = []
        if deltas or event.logprobs:
            logprobs = event.logprobs or ()
            told.append(Piece(sample=self._number, deltas=deltas, logprobs=logprobs))
        if event.result is not None:
            reason = event.result.finish_reason
            if self._has_called and reason == "stop":
                reason = "tool_calls"
            told.append(Ended(sample=self._number, finish_reason=reason, result=event.result))
        return told

    def _is_wanted(self, delta: OutputDelta) -> bool:
        """Say whether a delta is no part of a call too many."""
        if not isinstance(delta, ToolCallStarted | ToolCallDelta):
            return True
        self._has_called = True
        return self._most_calls is None or delta.index < self._most_calls


def _message(turn: ChatTurn) -> Message:
    return {"role": turn.role, "content": turn.content}
