"""What of a request may differ while its prompt begins as the one before, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shardnet.api.anthropic.body import ContinuedBody, continued
from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import chat_prompt
from shardnet.api.openai.chat_body import ChatBody, chat_request
from shardnet.api.responses.body import ResponseBody, response_request
from shardnet.wire.messages.plans import ModelChoice

MODEL = ModelChoice(model="m")
NAMES = ("read", "write", "run")
Read = Callable[..., ChatRequest]


def openai(system: list[str], choice: str) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    named = {"type": "function", "function": {"name": "run"}}
    choices: dict[str, Any] = {
        "any": "auto",
        "one": named,
        "allowed": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named]},
        },
    }
    content = [{"type": "text", "text": text} for text in system]
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "hi"}]
    body = {"messages": messages, "tools": tools, "tool_choice": choices[choice]}
    return chat_request(msgspec.convert(body, ChatBody), MODEL)


def responses(system: list[str], choice: str) -> ChatRequest:
    tools = [{"type": "function", "name": name} for name in NAMES]
    named = {"type": "function", "name": "run"}
    choices: dict[str, Any] = {
        "any": "auto",
        "one": named,
        "allowed": {"type": "allowed_tools", "mode": "required", "tools": [named]},
    }
    body = {
        "instructions": "\n".join(system),
        "input": "hi",
        "tools": tools,
        "tool_choice": choices[choice],
    }
    return response_request(msgspec.convert(body, ResponseBody), MODEL)


def anthropic(system: list[str], choice: str) -> ChatRequest:
    choices = {"any": {"type": "auto"}, "one": {"type": "tool", "name": "run"}}
    body = {
        "system": [{"type": "text", "text": text} for text in system],
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in NAMES],
        "tool_choice": choices[choice],
        "max_tokens": 9,
    }
    return continued(msgspec.convert(body, ContinuedBody), MODEL)


DIALECTS = pytest.mark.parametrize("read", [openai, responses, anthropic])


@DIALECTS
def test_what_claude_code_writes_of_each_request_is_left_out(read: Read) -> None:
    """Also where a program between has turned its blocks into one text, or another dialect."""
    bills = [f"x-anthropic-billing-header: cc_version=2; cch={n};" for n in range(2)]
    first, second = (chat_prompt(read([bill, "be", "brief"], "any")) for bill in bills)
    assert first == second
    assert first[0][0] == {"role": "system", "content": "be\nbrief"}
    [alone] = chat_prompt(read(bills[:1], "any"))[0]
    assert alone["role"] == "user"
    behind = chat_prompt(read(["be", bills[0], "brief"], "any"))
    assert behind == first
    told = f"say {bills[0]}"
    assert chat_prompt(read([told], "any"))[0][0]["content"] == told


@DIALECTS
def test_all_tools_are_shown_where_one_must_be_called(read: Read) -> None:
    """A grammar keeps the choice."""
    free, one = (chat_prompt(read(["be"], choice)) for choice in ("any", "one"))
    assert free == one
    assert read(["be"], "one").forced_tool == "run"


@pytest.mark.parametrize("read", [openai, responses])
def test_all_tools_are_shown_where_some_are_allowed(read: Read) -> None:
    allowed = read(["be"], "allowed")
    assert chat_prompt(allowed) == chat_prompt(read(["be"], "any"))
    assert [tool.name for tool in allowed.tools] == ["run"]
