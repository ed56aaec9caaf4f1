"""Anthropic's endpoints: what a body means, and how answers, streams and errors are written."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.servers.asgi_client import ask, asking
from support.servers.http_app import served

from shardnet.api.anthropic.answers import ToolUseBlock, ends_with, whole_blocks
from shardnet.api.anthropic.body import ContinuedBody, continued
from shardnet.api.anthropic.endpoints import fault_answer
from shardnet.api.chat.request import ChatTurn
from shardnet.api.chat_formats.marks import ToolCallDelta, ToolCallStarted
from shardnet.api.server.bodies import decode_body
from shardnet.api.server.errors import HttpError, fault_of
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings
from shardnet.constraints import Constraint
from shardnet.errors import BusyError, CapacityError, QueueFullError
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
EFFORTLESS = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def request(**fields: Any) -> Any:
    raw = msgspec.json.encode({"messages": HELLO, "max_tokens": 9, **fields})
    return continued(decode_body(raw, ContinuedBody), ModelChoice(model="m"))


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_a_conversation_with_tools_is_read() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"at": 2**80}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    messages = [
        {"role": "user", "content": [text("a"), {**text("b"), "cache_control": {}}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I "),
                text("look"),
                use,
            ],
        },
        {"role": "user", "content": [{**result, "content": [text("sun"), text("rain")]}]},
        {"role": "user", "content": [{**result, "content": "no", "is_error": True}, text("go on")]},
    ]
    billing = text("x-anthropic-billing-header: cc_version=1; cch=abc")
    server_tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    asked = request(
        system=[billing, text("be"), text("brief")],
        messages=messages,
        tools=[WEATHER, server_tool, {**WEATHER, "type": "custom", "name": "other"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
    )
    call = ToolCall(id="t1", name="weather", arguments=f'{{"at": {2**80}}}')
    assert asked.turns == (
        ChatTurn(role="system", content=f"{billing['text']}\nbe\nbrief"),
        ChatTurn(role="user", content="a\nb\nc"),
        ChatTurn(role="assistant", content="I look", reasoning="hm", tool_calls=(call,)),
        ChatTurn(role="tool", content="sun\nrain", tool_call_id="t1", name="weather"),
        ChatTurn(role="tool", content="Error: no", tool_call_id="t1", name="weather"),
        ChatTurn(role="user", content="go on"),
    )
    assert [tool.name for tool in asked.tools] == ["weather", "other"]
    assert asked.tools[0].parameters == {"type": "object"}
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("auto", False)


def test_options_have_anthropics_names_and_defaults() -> None:
    plain = request(system="be brief")
    assert plain.turns[0] == ChatTurn(role="system", content="be brief")
    assert (plain.sampling.temperature, plain.options["max_tokens"]) == (1.0, 9)
    assert plain.template_options == {}
    assert plain.sampling.seed != request().sampling.seed
    asked = request(
        temperature=0, top_p=0, top_k=5, stop_sequences=["x"], thinking={"type": "disabled"}
    )
    asked.sampling.check()
    assert (asked.sampling.temperature, asked.sampling.top_k) == (0, 5)
    assert asked.options["stop"] == ["x"]
    assert asked.template_options == {"enable_thinking": False, "thinking": False}
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert request(thinking=thinking).template_options["enable_thinking"] is True
    assert request(thinking={"type": "adaptive"}).template_options == {}
    shaped = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "array"}}}
    asked = request(output_config=shaped)
    assert asked.options["constraint"] == Constraint(kind="json_schema", text='{"type": "array"}')
    switched = {"enable_thinking": True, "thinking": True}
    assert asked.template_options == {**switched, "reasoning_effort": "low"}
    hard = {"effort": "max"}
    for kind in ("enabled", "adaptive"):
        asked = request(output_config=hard, thinking={"type": kind})
        assert asked.template_options == {**switched, "reasoning_effort": "max"}
    for off in ({"thinking": {"type": "disabled"}, "output_config": hard}, EFFORTLESS):
        assert request(**off).template_options == {"enable_thinking": False, "thinking": False}
    for choice, meant in (
        ({"type": "any"}, ("required", "")),
        ({"type": "tool", "name": "weather"}, ("required", "weather")),
        ({"type": "none"}, ("none", "")),
    ):
        asked = request(tools=[WEATHER], tool_choice=choice)
        assert (asked.tool_choice, asked.forced_tool) == meant


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [text("a"), IMAGE]}]},
            "messages[0].content[1].source.data",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].source.data",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *HELLO]},
            "messages[0].content[0].id",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages[1]",
        ),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tool_choice": {"type": "any"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "a"}, "tools": [WEATHER]}, "tool_choice.name"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(HttpError) as caught:
        request(**fields)
    assert (caught.value.fault.status, caught.value.fault.parameter) == (400, parameter)
    assert parameter in caught.value.fault.message


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = request(messages=[*HELLO, {"role": "assistant", "content": "{"}])
    assert begun.template_options == {CONTINUES: True}
    assert (begun.turns[-1].role, begun.turns[-1].content) == ("assistant", "{")
    assert request(messages=HELLO).template_options == {}


def named_events(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream by their names."""
    found = []
    for part in content.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(
            (name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: ")))
        )
    return found


def test_an_answer_and_its_stream_say_the_same() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"messages": HELLO, "max_tokens": 9, "model": "tiny-llama"}
            answer = (await ask(server.app, MESSAGES, body)).json
            assert answer.pop("id").startswith("msg_")
            used = {"input_tokens": 1, "cache_read_input_tokens": 1, "output_tokens": 4}
            usage = {**used, "cache_creation_input_tokens": 0}
            assert answer == {
                "type": "message",
                "role": "assistant",
                "model": "org/Tiny-Llama",
                "content": [text("hello")],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": usage,
            }
            exchanged = await ask(server.app, MESSAGES, {**body, "stream": True})
            events = named_events(exchanged.content)
            assert all(name == data["type"] for name, data in events)
            [start, begin, *deltas, end, last, stop] = [data for _, data in events]
            assert start["message"]["content"] == []
            assert start["message"]["stop_reason"] is None
            assert begin == {
                "type": "content_block_start",
                "index": 0,
                "content_block": text(""),
            }
            assert {delta["delta"]["type"] for delta in deltas} == {"text_delta"}
            assert "".join(delta["delta"]["text"] for delta in deltas) == "hello"
            assert end == {"type": "content_block_stop", "index": 0}
            assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
            assert (last["usage"], stop) == (usage, {"type": "message_stop"})

            cut = (await ask(server.app, MESSAGES, {**body, "stop_sequences": ["ell"]})).json
            assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "ell")

    asyncio.run(main())


def test_what_ended_tokens_is_found_though_a_character_is_split() -> None:
    assert ends_with(["a", "\ufffd", "\ufffd", "\ufffdb"], "。")
    assert ends_with(["a", "E", "ND."], "END")
    assert not ends_with(["a", "\ufffd\ufffd", "<|end|>"], "。")
    assert not ends_with(["END", "<|end|>"], "END")
    assert not ends_with([], "END")


def test_calls_and_thinking_are_blocks_of_their_own() -> None:
    async def main() -> None:
        words = (
            '<think>hm</think>I look.<tool_call>{"name": "weather", "arguments": {"a": 1}}'
            '</tool_call><tool_call>{"name": "weather", "arguments": {}}</tool_call>'
        )
        body = {
            "messages": [{"role": "user", "content": words}],
            "tools": [WEATHER],
            "max_tokens": 999,
        }
        async with served() as server:
            answer = (await ask(server.app, MESSAGES, body)).json
            assert answer["stop_reason"] == "tool_use"
            thinking, said, first, second = answer["content"]
            assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
            assert said == text("I look.")
            assert first.pop("id")
            assert first == {"type": "tool_use", "name": "weather", "input": {"a": 1}}
            assert second["input"] == {}

            exchanged = await ask(server.app, MESSAGES, {**body, "stream": True})
            told = [data for _, data in named_events(exchanged.content)]
            blocks: list[dict[str, Any]] = []
            for event in told:
                if event["type"] == "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append({**event["content_block"], "kinds": [], "text": ""})
                elif event["type"] == "content_block_delta":
                    assert event["index"] == len(blocks) - 1
                    kind, piece = event["delta"].values()
                    blocks[-1]["kinds"].append(kind)
                    blocks[-1]["text"] += piece
                elif event["type"] == "content_block_stop":
                    assert event["index"] == len(blocks) - 1
            assert [(block["type"], block["text"]) for block in blocks] == [
                ("thinking", "hm"),
                ("text", "I look."),
                ("tool_use", '{"a": 1}'),
                ("tool_use", "{}"),
            ]
            assert blocks[0]["kinds"][-1] == "signature_delta"
            assert {*blocks[2]["kinds"]} == {"input_json_delta"}
            assert blocks[2]["input"] == {}
            assert blocks[2]["id"] != blocks[3]["id"]
            assert told[-2]["delta"]["stop_reason"] == "tool_use"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cut", "finish", "reason", "stop"),
    [
        ("END.", "stop", "stop_sequence", "END"),
        ("EN", "stop", "end_turn", None),
        ("EN", "length", "model_context_window_exceeded", None),
    ],
)
def test_a_call_that_is_cut_off_is_none(
    cut: str, finish: str, reason: str, stop: str | None
) -> None:
    async def main() -> None:
        words = '<tool_call>{"name": "weather", "arguments": {"a": "' + 600 * "x" + cut
        body = {
            "messages": [{"role": "user", "content": words}],
            "tools": [WEATHER],
            "max_tokens": 999,
            "stop_sequences": ["END"],
        }
        async with served() as server:
            server.node.finish_reason = finish
            answer = (await ask(server.app, MESSAGES, body)).json
            assert answer["content"] == []
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
            exchanged = await ask(server.app, MESSAGES, {**body, "stream": True})
            events = named_events(exchanged.content)
            kinds = [name for name, _ in events if name != "content_block_delta"]
            assert kinds[1:] == [
                *("content_block_start", "content_block_stop", "message_delta", "message_stop")
            ]
            [last] = [data for name, data in events if name == "message_delta"]
            assert last["delta"] == {"stop_reason": reason, "stop_sequence": stop}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": NaN}', "{}"),
        ("[1]", "{}"),
        ('{"a', "{}"),
        ('{"a":' * 100_000, "{}"),
    ],
)
def test_the_input_of_a_call_is_an_object_whatever_was_written(written: str, meant: str) -> None:
    deltas = [ToolCallStarted(0, "c", "f"), ToolCallDelta(0, written)]
    [block] = whole_blocks(deltas)
    assert isinstance(block, ToolUseBlock)
    assert bytes(block.input) == meant.encode()


def test_a_stream_that_waits_has_pings() -> None:
    async def main() -> None:
        async with served(Settings(headers_s=0.01, heartbeat_s=0.01)) as server:
            body = {
                "messages": [{"role": "user", "content": "wait"}],
                "max_tokens": 9,
                "stream": True,
            }
            async with asyncio.timeout(30), asking(server.app, MESSAGES, body) as running:
                await running.until_said(
                    b': reading the prompt\n\nevent: ping\ndata: {"type":"ping"}\n\n'
                )
            assert server.node.given_up == ["wait"]

    asyncio.run(main())


def test_tokens_are_counted_and_nothing_is_generated() -> None:
    async def main() -> None:
        async with served() as server:
            assert (await ask(server.app, COUNT, {"messages": HELLO})).json == {"input_tokens": 5}
            assert server.node.asked == []

    asyncio.run(main())


def test_errors_have_anthropics_form() -> None:
    async def main() -> None:
        keys = Keyring([parse_key("ann:one", 1)])
        async with served(Settings(keys=keys)) as server:
            mine = {"headers": {"x-api-key": "one"}}
            long = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 9}
            for is_stream in (False, True):
                answer = await ask(server.app, MESSAGES, {**long, "stream": is_stream}, **mine)
                assert answer.status == 400
                assert answer.json == {
                    "type": "error",
                    "error": {
                        "type": "invalid_request_error",
                        "message": "prompt is too long: 99 tokens > 64 maximum "
                        "(maximum context length is 64 tokens)",
                    },
                }
            for body, how, status, kind in (
                ({**long, "model": "claude-x"}, mine, 404, "not_found_error"),
                (long, {}, 401, "authentication_error"),
                ({"messages": HELLO}, mine, 400, "invalid_request_error"),
            ):
                answer = await ask(server.app, MESSAGES, body, **how)
                assert (answer.status, answer.json["error"]["type"]) == (status, kind)

    asyncio.run(main())
    for error, kind in (
        (QueueFullError("a"), "rate_limit_error"),
        (BusyError("a"), "overloaded_error"),
        (CapacityError("a"), "invalid_request_error"),
        (ValueError("a"), "api_error"),
    ):
        assert fault_answer(fault_of(error)).error.type == kind
