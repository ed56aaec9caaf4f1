"""A request to a chat model, whatever dialect it came in.

Knows what such requests have in common: a conversation with tool calls and their results, tools,
sampling, limits. Must not know HTTP, nor how a model's template writes any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from shardnet.api.chat.pictures import Part, only_pictured, text_of
from shardnet.api.requests import GenerationOptions
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

ToolChoice = Literal["auto", "none", "required"]
OptionValue: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One message. `role` is system, user, assistant, tool or another that the template knows.

    An assistant's turn may have `reasoning` and `tool_calls`; the turn of a tool has the result of
    the call `tool_call_id`, and may have the `name` of the tool. One with pictures has `parts`, of
    whose texts its content consists.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, role: str, parts: Sequence[Part], **fields: Any) -> ChatTurn:
        """Make a turn whose content consists of `parts`."""
        return cls(role=role, content=text_of(parts), parts=only_pictured(parts), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, None without any."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation, and how it is continued.

    `model` is what the nodes are sent, not the dialect's name. With `tool_choice` required the
    model must call a tool, with `forced_tool` that one; without `parallel_tool_calls` one at most.
    `template_options` are passed to the chat template. The sampling's `n_logprobs` asks for
    logprobs, the options' `constraint` for JSON.
    """

    turns: tuple[ChatTurn, ...]
    model: ModelChoice
    sampling: SamplingParams
    options: GenerationOptions
    n: int = 1
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str = ""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, OptionValue] = field(default_factory=dict)


def joined_turns(turns: Iterable[ChatTurn], *, roles: tuple[str, ...]) -> Iterator[ChatTurn]:
    """Yield the turns, those of one of the `roles` that follow each other as one.

    Templates may insist on turns that alternate, and on one system turn at the beginning.
    """
    last: ChatTurn | None = None
    for turn in turns:
        if last is not None and last.role == turn.role and turn.role in roles:
            last = _joined(last, turn)
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _joined(turn: ChatTurn, more: ChatTurn) -> ChatTurn:
    parts: tuple[Part, ...] = ()
    if turn.parts or more.parts:
        parts = (*(turn.parts or (turn.content,)), *(more.parts or (more.content,)))
    return replace(turn, content=f"{turn.content}\n{more.content}", parts=parts)
