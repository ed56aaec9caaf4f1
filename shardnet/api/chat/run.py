"""Run a chat request, and yield the output of each sample as deltas.

Knows the client's events, and how a parser is chosen and fed. Must not know any dialect, nor HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, Unpack

from shardnet.api.chat.request import (
    ChatRequest,
    ChatTurn,
    Tool,
    thinking_options,
    without_bills,
    written,
)
from shardnet.api.chat_formats.choice import (
    MOST_EQUAL_CALLS,
    EqualCalls,
    ToolChoice,
    choose_format,
    with_ids,
)
from shardnet.api.chat_formats.marks import (
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    TokenText,
    ToolCallCut,
    ToolCallStarted,
)
from shardnet.api.chat_formats.reader import HOLD
from shardnet.api.chat_grammars.output import may_begin_thought, output_constraint
from shardnet.api.events import GenerationEvent, GenerationResult, TokenLogprob
from shardnet.api.generation import Generator
from shardnet.api.requests import GenerationOptions, Message, Prompt, thought_of
from shardnet.constraints import Constraint
from shardnet.errors import ContextExceededError
from shardnet.json_schemas import relax
from shardnet.wire.messages.chat import TokenizerDescribed
from shardnet.wire.messages.generation import Detokenized, Tokenized
from shardnet.wire.messages.plans import ModelChoice

TAIL_TOKENS: Final = 32
"""Tokens at the end of a prompt that are searched for the beginning of reasoning."""


class ChatGenerator(Generator, Protocol):
    """A generator that also describes tokenizers, tokenises and detokenises."""

    async def describe_tokenizer(
        self, *, model: str | ModelChoice | None = None
    ) -> TokenizerDescribed:
        """Describe a model's tokenizer as `shardnet.api.Client.describe_tokenizer` does."""

    async def tokenize(
        self,
        prompt: str | Sequence[int] | Sequence[Message] | Prompt,
        *,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Tokenized:
        """Return a prompt's token ids as `shardnet.api.Client.tokenize` does."""

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | ModelChoice | None = None,
    ) -> Detokenized:
        """Return the text of token ids as `shardnet.api.Client.detokenize` does."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The ring has accepted the request: its prompt and parameters cause no more errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next output of one sample: deltas, and the logprobs of the tokens in them.

    Every tool call in them has an id.
    """

    sample: int
    deltas: Sequence[OutputDelta]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of one sample: `finish_reason` is stop, length or tool_calls.

    After a ToolCallCut, which ends a call that was begun but is none, it is never tool_calls.
    `n_thought` counts the tokens up to the last one of the reasoning.
    """

    sample: int
    finish_reason: str
    result: GenerationResult
    n_thought: int = 0


ChatEvent: TypeAlias = Accepted | Piece | Ended


async def run_chat(
    generator: ChatGenerator,
    request: ChatRequest,
    *,
    is_streamed: bool,
    most_equal_calls: int = MOST_EQUAL_CALLS,
    thought_budget: int | None = None,
) -> AsyncGenerator[ChatEvent, None]:
    """Run a request and yield its events: Accepted first, then for each sample pieces and its end.

    A grammar of the model's format enforces a tool call that is required, and the options'
    `constraint` where tool calls or reasoning may precede the answer.

    Unless it `is_streamed`, a tool call is yielded when it is complete. Of equal calls in a row
    only the first `most_equal_calls` are yielded, with 0 all. `thought_budget` is that of requests
    that do not say. Closing the iterator cancels the request. Raises the first error of any sample.
    """
    budget = thought_budget if request.thought_budget is None else request.thought_budget
    if budget == 0:
        switched = thinking_options(False, request.template_options)
        request = replace(request, template_options=switched)
    described = await generator.describe_tokenizer(model=request.model)
    reader = _Reader(described, request, hold=HOLD if is_streamed else None)
    messages, options = chat_prompt(request)
    options["constraint"] = await _constraint(generator, request, reader, messages, options)
    bound = None if budget is None or budget < 0 else budget
    options["thinking"] = thought_of(reader.described, bound, request.thought_message)
    events = generator.generate(
        messages, request.sampling, n=request.n, model=request.model, **options
    )
    samples: dict[int, _Sample] = {}
    tails: dict[int, str] = {}
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            if not tails:
                yield Accepted()
            if event.sample not in samples:
                tail = tails[event.sample] = event.prompt_tail or tails.get(event.sample, "")
                if not event.token_ids and event.result is None:
                    continue
                parser = reader.parser(prompt_tail=tail)
                calls = EqualCalls(most_equal_calls)
                samples[event.sample] = _Sample(event.sample, parser, calls, reader.format.name)
            for told in samples[event.sample].take(event):
                yield told


def chat_prompt(request: ChatRequest) -> tuple[list[Message], GenerationOptions]:
    """Return the messages and the options with which a client generates, or counts tokens."""
    options = request.options.copy()
    options["keep_special_tokens"] = True  # parsers look for them
    shown = _tools(request.shown_tools or request.tools)
    options["tools"] = [] if request.tool_choice == "none" else shown
    options["template_options"] = request.template_options
    return [*map(_message, without_bills(request.turns))], options


async def count_prompt(generator: ChatGenerator, request: ChatRequest) -> int:
    """Count the tokens of a prompt, one that is longer than the context too."""
    messages, options = chat_prompt(request)
    try:
        told = await generator.tokenize(messages, model=request.model, **options)
    except ContextExceededError as error:
        if not error.n_prompt:
            raise
        return error.n_prompt
    return len(told.token_ids)


class _Reader:
    """Makes the parsers of a request's output, in the format of the model."""

    def __init__(
        self, described: TokenizerDescribed, request: ChatRequest, *, hold: int | None
    ) -> None:
        self.described = described
        self.tokens = {
            token.token_id: TokenText(token.text, token.is_special) for token in described.added
        }
        self.format = choose_format(described.template, self.tokens)
        self.choice = _choice(request)
        self.parser = partial(
            self.format.parser,
            tokens=self.tokens,
            tools=_tools(request.tools),
            choice=self.choice,
            hold=hold,
        )


async def _constraint(
    generator: ChatGenerator,
    request: ChatRequest,
    reader: _Reader,
    messages: Sequence[Message],
    options: GenerationOptions,
) -> Constraint | None:
    """Return the constraint on the output, if any. Raises what tokenising the prompt raises."""
    answer = request.options.get("constraint")
    if answer is None and not reader.choice.must_call:
        return None
    tail = ""
    if may_begin_thought(reader.format, reader.described.template):
        free = options.copy()
        free.pop("constraint", None)
        told = await generator.tokenize(messages, model=request.model, **free)
        last = told.token_ids[-TAIL_TOKENS:]
        said = await generator.detokenize(last, keep_special_tokens=True, model=request.model)
        tail = said.text
    tools, left_out = _relaxed(request.tools)
    constraint = output_constraint(
        template=reader.described.template,
        tokens=reader.tokens,
        tools=_tools(tools),
        choice=reader.choice,
        answer=answer,
        prompt_tail=tail,
    )
    if constraint is None:
        return None
    kept_of_answer = answer.left_out if answer is not None else ()
    return replace(constraint, left_out=tuple(dict.fromkeys([*kept_of_answer, *left_out])))


class _Sample:
    """The output of one sample on its way through the parser."""

    def __init__(
        self, number: int, parser: OutputParser, calls: EqualCalls, format_name: str
    ) -> None:
        self._number = number
        self._parser = parser
        self._calls = calls
        self._format_name = format_name
        self._has_called = self._is_cut = False
        self._n_tokens = self._n_thought = 0

    def take(self, event: GenerationEvent) -> list[ChatEvent]:
        """Return an event's Piece, if it has output, and an Ended if it is the sample's last."""
        deltas = self._calls.feed(self._parser.feed(event.token_ids, event.text))
        if event.result is not None:
            deltas += [*self._calls.feed(self._parser.finish()), *self._calls.finish()]
        deltas = with_ids(deltas, self._format_name, secrets.choice)
        self._has_called |= any(isinstance(delta, ToolCallStarted) for delta in deltas)
        self._is_cut |= any(isinstance(delta, ToolCallCut) for delta in deltas)
        self._n_tokens += len(event.token_ids)
        if any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self._n_thought = self._n_tokens
        told: list[ChatEvent] = []
        if deltas or event.logprobs:
            logprobs = event.logprobs or ()
            told.append(Piece(sample=self._number, deltas=deltas, logprobs=logprobs))
        if event.result is not None:
            reason = event.result.finish_reason
            if self._has_called and not self._is_cut and reason == "stop":
                reason = "tool_calls"
            told.append(
                Ended(
                    sample=self._number,
                    finish_reason=reason,
                    result=event.result,
                    n_thought=self._n_thought,
                )
            )
        return told


def _choice(request: ChatRequest) -> ToolChoice:
    """Return how the request's tools may be used."""
    mode = "named" if request.forced_tool else request.tool_choice if request.tools else "none"
    return ToolChoice(mode=mode, name=request.forced_tool, is_parallel=request.parallel_tool_calls)


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Write tools as OpenAI's API has them, which chat templates expect."""
    written = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
        if tool.parameters is not None:
            function["parameters"] = tool.parameters
        written.append({"type": "function", "function": function})
    return written


def _relaxed(tools: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """Drop what a grammar cannot enforce from the schemas of tools that are not strict.

    Returns the tools, and the names of what was dropped.
    """
    relaxed: list[Tool] = []
    left_out: list[str] = []
    for tool in tools:
        if tool.parameters is not None and not tool.strict:
            parameters, names = relax(tool.parameters)
            tool = replace(tool, parameters=parameters)
            left_out += names
        relaxed.append(tool)
    return relaxed, left_out


def _message(turn: ChatTurn) -> Message:
    content = written(turn.parts) if turn.parts else turn.content
    message: Message = {"role": turn.role, "content": content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message
