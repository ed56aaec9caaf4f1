"""Conversations of each dialect and templates that do not take them as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.servers.asgi_client import Exchanged, ask
from support.servers.http_app import Served, served
from support.system.parrot import make_scripted
from support.template_texts import CODER, GLM, QWEN

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.requests import prompt_ids
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.wire.messages.generation import Generate

CUT = '{"city": "B'
"""Arguments as a limit of tokens cuts them off."""
DEEP: dict[str, Any] = json.loads('{"a":' * 70 + "1" + "}" * 70)
"""Arguments that no template is given: it would write them by recursion."""

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
DIALECTS = [CHAT, RESPONSES, MESSAGES, OLLAMA]


def called(path: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A conversation of three messages: the second calls f, the third is the result."""
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    user = {"role": "user", "content": "Hi"}
    match path:
        case "/v1/chat/completions":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": as_text}}
            result = {"role": "tool", "tool_call_id": "c1", "content": "no"}
            mine = {"role": "assistant", "content": None, "tool_calls": [call]}
            return {"messages": [user, mine, result]}
        case "/v1/responses":
            call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": as_text}
            result = {"type": "function_call_output", "call_id": "c1", "output": "no"}
            return {"input": [user, call, result]}
        case "/v1/messages":
            call = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "no"}
            mine = {"role": "assistant", "content": [call]}
            return {"messages": [user, mine, {"role": "user", "content": [result]}]}
        case _:
            mine = {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            result = {"role": "tool", "tool_name": "f", "content": "no"}
            return {"messages": [user, {"role": "assistant", **mine}, result]}


def spoken(path: str, *said: tuple[str, str]) -> dict[str, Any]:
    """A conversation of texts, by roles."""
    messages = [{"role": role, "content": text} for role, text in said]
    return {"input": messages} if path == RESPONSES else {"messages": messages}


@asynccontextmanager
async def templated(folder: Path, template: str) -> AsyncIterator[tuple[Served, list[str]]]:
    """Serve a node that has this template; give the prompts that it makes."""
    prompts: list[str] = []
    with Tokenizer.load(make_scripted(folder / "m", template, {})) as tokenizer:
        config = SimpleNamespace(vocab_size=tokenizer.n_tokens, max_positions=1 << 14)
        facts = SimpleNamespace(config=config, path="m")
        spec = SimpleNamespace(config=config, form=SimpleNamespace(context=1 << 14))
        plan, ring = SimpleNamespace(facts=facts), SimpleNamespace(spec=spec)
        lead = cast(Lead, SimpleNamespace(tokenizer=tokenizer, plan=plan, ring=ring))

        async def before(control: ControlLink, message: Incoming) -> None:
            if isinstance(message, Generate):
                token_ids = await asyncio.to_thread(prompt_ids, message, lead)
                prompts.append(tokenizer.decode(token_ids, keep_special_tokens=True))

        async with served() as server:
            server.node.before = before
            yield server, prompts


async def answer(server: Served, path: str, body: dict[str, Any]) -> Exchanged:
    fields = {"model": "tiny-llama", "stream": False, "max_tokens": 4}
    return await ask(server.app, path, {**fields, **body})


@pytest.mark.parametrize("template", [GLM, CODER])
@pytest.mark.parametrize("path", DIALECTS)
def test_arguments_that_cannot_be_read_do_not_end_a_conversation(
    path: str, template: str, tmp_path: Path
) -> None:
    broken: Any = DEEP if path in (MESSAGES, OLLAMA) else CUT

    async def main() -> None:
        async with templated(tmp_path, template) as (server, prompts):
            told = await answer(server, path, called(path, broken))
            assert told.status == 200, told.content
            [prompt] = prompts
            text = broken if isinstance(broken, str) else '{"a":'
            assert "arguments" in prompt
            assert text in prompt

    asyncio.run(main())


@pytest.mark.parametrize("path", DIALECTS)
def test_a_message_that_a_template_cannot_show_is_the_request_s_own_fault(
    path: str, tmp_path: Path
) -> None:
    template = GLM.replace(
        "{{ message.content", "{{ 'a' + 1 if message.role == 'tool' }}{{ message.content"
    )

    async def main() -> None:
        async with templated(tmp_path, template) as (server, prompts):
            told = await answer(server, path, called(path, {"city": "Bern"}))
            assert told.status == 400
            words = "message 3 of 3 (tool) cannot be shown by the chat template"
            assert words in told.content.decode()
            assert "fetch the checkpoint" not in told.content.decode()
            assert (await answer(server, path, spoken(path, ("user", "Hi")))).status == 200
            assert len(prompts) == 1

    asyncio.run(main())


@pytest.mark.parametrize("path", DIALECTS)
def test_a_template_that_fails_at_any_message_is_the_checkpoint_s_fault(
    path: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with templated(tmp_path, "{{ messages[0].a.b }}") as (server, _):
            told = await answer(server, path, called(path, {}))
            assert told.status == 404
            assert "fetch the checkpoint again" in told.content.decode()

    asyncio.run(main())


@pytest.mark.parametrize("path", DIALECTS)
def test_system_messages_anywhere_are_one_where_a_template_wants_it_first(
    path: str, tmp_path: Path
) -> None:
    said = [("system", "A"), ("user", "Hi"), ("assistant", "Yo"), ("system", "B"), ("user", "So?")]
    expected = (
        "<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    field = {MESSAGES: "system", RESPONSES: "instructions"}.get(path)

    async def main() -> None:
        async with templated(tmp_path, QWEN) as (server, prompts):
            assert (await answer(server, path, spoken(path, *said))).status == 200
            assert (await answer(server, path, spoken(path, *said[1:]))).status == 200
            if field:  # beside a system message that stands first
                body = {field: "A", **spoken(path, ("system", "B"), *said[1:3], said[4])}
                assert (await answer(server, path, body)).status == 200
            assert prompts == [expected, expected.replace("A\n", ""), expected][: 2 + bool(field)]

    asyncio.run(main())
