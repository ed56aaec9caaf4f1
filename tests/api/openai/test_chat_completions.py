"""Chat completions: what a body means, and how deltas are written."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import msgspec
import pytest
from support.cluster import scripted_node
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.chat.request import ChatTurn
from shardnet.api.openai.chat_body import ChatBody, chat_request
from shardnet.api.server.bodies import decode_body
from shardnet.api.server.errors import HttpError
from shardnet.api.server.settings import Settings
from shardnet.constraints import Constraint
from shardnet.wire.messages.chat import MAX_TEMPLATE_OPTIONS, ToolCall
from shardnet.wire.messages.plans import ModelChoice

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def request(**fields: Any) -> Any:
    raw = msgspec.json.encode({"messages": HELLO, **fields})
    return chat_request(decode_body(raw, ChatBody), ModelChoice(model="m"))


def test_a_conversation_with_tools_is_read() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"at": 1}'},
    }
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "assistant", "reasoning": "well", "content": "it is"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
    ]
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
        {"type": "web_search"},
    ]
    asked = request(messages=messages, tools=tools, parallel_tool_calls=False)
    assert asked.turns == (
        ChatTurn(role="system", content="a\nb"),
        ChatTurn(role="user", content="hi", name="ann"),
        ChatTurn(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="weather", arguments='{"at": 1}'),),
        ),
        ChatTurn(role="tool", content="sun", tool_call_id="c1"),
        ChatTurn(role="assistant", reasoning="well", content="it is"),
        ChatTurn(role="assistant", content="no"),
        ChatTurn(role="assistant", content="never"),
    )
    assert [tool.name for tool in asked.tools] == ["weather"]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("auto", False)
    named = {"type": "function", "function": {"name": "weather"}}
    forced = request(tools=tools, tool_choice=named)
    assert (forced.tool_choice, forced.forced_tool) == ("required", "weather")
    more = [*tools, {"type": "function", "function": {"name": "other"}}]
    allowed = {"mode": "required", "tools": [named]}
    some = request(tools=more, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert ([tool.name for tool in some.tools], some.tool_choice) == (["weather"], "required")
    assert some.forced_tool == ""


def test_options_have_openais_names_and_defaults() -> None:
    plain = request()
    assert (plain.sampling.temperature, plain.sampling.n_logprobs, plain.n) == (1.0, None, 1)
    assert plain.sampling.seed != request().sampling.seed
    asked = request(
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0,
        top_p=0,
        top_k=-1,
        seed=-1,
        stop="x",
        n=2,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"5": -100},
        priority=7,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert (asked.options["max_tokens"], asked.options["stop"]) == (7, ["x"])
    assert asked.sampling.top_p > 0
    assert (asked.sampling.top_k, asked.sampling.seed) == (0, 2**64 - 1)
    assert (asked.sampling.n_logprobs, asked.sampling.logit_bias) == (3, ((5, -100.0),))
    assert (asked.n, asked.options["priority"]) == (2, 7)
    assert asked.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    thoughtless = {"enable_thinking": False, "thinking": False}
    assert request(reasoning_effort="none").template_options == thoughtless
    assert request(reasoning_effort="").template_options == {}
    for effort in ("minimal", "high", "max", "odd"):
        hard = {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}
        assert request(reasoning_effort=effort).template_options == hard
    given = {"thinking": True, "reasoning_effort": "max", "a": 1}
    asked_twice = request(reasoning_effort="none", chat_template_kwargs=given)
    assert asked_twice.template_options == given
    asked.sampling.check()
    assert request(stop="").options["stop"] == []
    begun = request(
        messages=[*HELLO, {"role": "assistant", "content": "{"}], continue_final_message=True
    )
    assert begun.template_options == {"continue_final_message": True}


def test_a_node_takes_as_many_options_of_the_template_as_a_request_may_have() -> None:
    said = {
        "messages": [*HELLO, {"role": "assistant", "content": "{"}],
        "continue_final_message": True,
        "reasoning_effort": "low",
    }
    most = dict.fromkeys([f"a{n}" for n in range(28)], 1)
    assert len(request(**said, chat_template_kwargs=most).template_options) == MAX_TEMPLATE_OPTIONS
    with pytest.raises(HttpError, match="chat_template_kwargs"):
        request(**said, chat_template_kwargs={**most, "b": 1})


def test_response_formats_are_constraints() -> None:
    assert request(response_format={"type": "text"}).options["constraint"] is None
    any_json = request(response_format={"type": "json_object"}).options["constraint"]
    assert any_json == Constraint(kind="json")
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    by_schema = request(response_format=schema).options["constraint"]
    assert by_schema == Constraint(kind="json_schema", text='{"type": "array"}')


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "wizard", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "SYSTEM", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{"name": "a"}], "tools": [{"type": "web_search"}]}, "functions"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"n": 1000}, "n"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(HttpError) as caught:
        request(**fields)
    assert (caught.value.fault.status, caught.value.fault.parameter) == (400, parameter)
    if fields == {"messages": []}:
        assert caught.value.fault.message == "messages is []: give a list that is not empty"


def test_an_answer_and_its_stream_say_the_same() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"messages": HELLO, "n": 2, "model": "tiny-llama"}
            answer = (await ask(server.app, CHAT, body)).json
            assert answer["model"] == "org/Tiny-Llama"
            assert server.node.asked[-1].choice.model == "org/Tiny-Llama"
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            message = answer["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "hello", "refusal": None}
            assert answer["choices"][1]["finish_reason"] == "stop"
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 8)
            assert usage["prompt_tokens_details"] == {"cached_tokens": 1}

            options = {"include_usage": True}
            streamed = {**body, "stream": True, "stream_options": options}
            *chunks, last, done = (await ask(server.app, CHAT, streamed)).events
            assert done == "[DONE]"
            assert (last["choices"], last["usage"]) == ([], usage)
            assert {chunk["usage"] for chunk in chunks} == {None}
            assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
            for number in (0, 1):
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == number]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"].get("content", "") for c in mine) == "hello"
                assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
                assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, "stop")
            plain = (await ask(server.app, CHAT, {**body, "stream": True})).events
            assert all("usage" not in chunk for chunk in plain[:-1])

    asyncio.run(main())


def test_calls_and_reasoning_have_openais_form() -> None:
    async def main() -> None:
        text = '<think>hm</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        body = {
            "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
        async with served() as server:
            [choice] = (await ask(server.app, CHAT, body)).json["choices"]
            assert choice["finish_reason"] == "tool_calls"
            message = choice["message"]
            assert (message["content"], message["reasoning"]) == (None, "hm")
            assert message["reasoning_content"] == "hm"
            [call] = message["tool_calls"]
            assert call["id"].startswith("call_")
            assert call["type"] == "function"
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}

            events = (await ask(server.app, CHAT, {**body, "stream": True})).events
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            thoughts = [(d.get("reasoning"), d.get("reasoning_content")) for d in deltas]
            assert "".join(one for one, _ in thoughts if one) == "hm"
            assert all(one == other for one, other in thoughts)
            first, *rest = [part for d in deltas for part in d.get("tool_calls", ())]
            assert (first["index"], first["type"], first["function"]["name"]) == (
                0,
                "function",
                "f",
            )
            assert all("id" not in part and part["index"] == 0 for part in rest)
            arguments = [part["function"]["arguments"] for part in (first, *rest)]
            assert "".join(arguments) == '{"a": 1}'
            assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"

    asyncio.run(main())


@pytest.mark.parametrize("form", ["tools", "functions"])
def test_a_call_that_is_cut_off_is_none(form: str) -> None:
    async def main() -> None:
        cut = '<tool_call>{"name": "f", "arguments": {"a": "' + 600 * "x"
        function = {"name": "f"}
        offered = function if form == "functions" else {"type": "function", "function": function}
        body = {"messages": [{"role": "user", "content": cut}], form: [offered]}
        async with served() as server:
            for reason in ("stop", "length"):
                server.node.finish_reason = reason
                [choice] = (await ask(server.app, CHAT, body)).json["choices"]
                assert (choice["finish_reason"], choice["message"]["content"]) == (reason, "")
                assert not {"tool_calls", "function_call"} & choice["message"].keys()
                events = (await ask(server.app, CHAT, {**body, "stream": True})).events
                choices = [event["choices"][0] for event in events[:-1]]
                assert any({"tool_calls", "function_call"} & one["delta"].keys() for one in choices)
                assert choices[-1]["finish_reason"] == reason

    asyncio.run(main())


def test_how_many_equal_calls_an_answer_may_have_is_a_setting() -> None:
    async def main() -> None:
        text = 5 * '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'
        body = {
            "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": {"name": "roll"}}],
        }
        for settings, n_calls in (
            (Settings(), 3),
            (Settings(most_equal_calls=1), 1),
            (Settings(most_equal_calls=0), 5),
        ):
            async with served(settings) as server:
                [choice] = (await ask(server.app, CHAT, body)).json["choices"]
                calls = choice["message"]["tool_calls"]
                assert len({call["id"] for call in calls}) == len(calls) == n_calls
                events = (await ask(server.app, CHAT, {**body, "stream": True})).events
                parts = [event["choices"][0]["delta"].get("tool_calls") for event in events[:-1]]
                started = [part[0]["index"] for part in parts if part and "id" in part[0]]
                assert started == [*range(n_calls)]

    asyncio.run(main())


def test_functions_are_tools_in_their_old_form() -> None:
    async def main() -> None:
        text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        called = {"name": "f", "arguments": "{}"}
        messages = [
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "f", "content": "sun"},
            {"role": "user", "content": 2 * text},
        ]
        body = {"messages": messages, "functions": [{"name": "f"}], "function_call": "auto"}
        async with served() as server:
            [choice] = (await ask(server.app, CHAT, body)).json["choices"]
            function = {"name": "f", "arguments": '{"a": 1}'}
            assert choice["message"]["function_call"] == function
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "function_call"
            events = (await ask(server.app, CHAT, {**body, "stream": True})).events
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            first, *rest = [d["function_call"] for d in deltas if "function_call" in d]
            assert first == {"name": "f", "arguments": ""}
            assert "".join(part["arguments"] for part in rest) == '{"a": 1}'
            assert events[-2]["choices"][0]["finish_reason"] == "function_call"

    asyncio.run(main())
    asked = request(
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            {"role": "function", "name": "f", "content": "sun"},
        ],
        functions=[{"name": "f"}, {"name": "g"}],
        function_call={"name": "g"},
    )
    _, mine, answer = asked.turns
    assert [call.name for call in mine.tool_calls] == ["f"]
    assert (answer.role, answer.name, answer.content) == ("tool", "f", "sun")
    assert ([tool.name for tool in asked.tools], asked.forced_tool) == (["f", "g"], "g")


def test_what_a_schema_only_narrows_is_left_out_unless_it_is_strict() -> None:
    async def main() -> None:
        schema = {"type": "array", "uniqueItems": True, "items": {"properties": {"a": {}}}}
        wanted: dict[str, Any] = {"name": "a", "schema": schema}
        async with served() as server:
            for is_strict in (False, True):
                form = {"type": "json_schema", "json_schema": {**wanted, "strict": is_strict}}
                body = {"messages": HELLO, "response_format": form}
                answer = await ask(server.app, CHAT, body)
                told = answer.headers.get("x-shardnet-schema-left-out")
                assert told == (None if is_strict else "uniqueItems")
                sent = server.node.asked[-1].constraint
                assert sent is not None
                assert ("uniqueItems" in sent.text) is is_strict
                assert '"additionalProperties": false' in sent.text
            tool = {"name": "f", "parameters": {"properties": {"n": {"not": {"const": 1}}}}}
            body = {
                "messages": HELLO,
                "tools": [{"type": "function", "function": tool}],
                "tool_choice": "required",
            }
            told = (await ask(server.app, CHAT, body)).headers["x-shardnet-schema-left-out"]
            assert told == "not"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#/$defs/gone"}, "#/$defs/gone' leads to no schema in it"),
        ({"type": "integer", "maximum": 1 << 64}, "the number in maximum 18446744073709551616"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(schema: dict[str, Any], why: str) -> None:
    whole = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "name": "a", "schema": whole, "strict": True}
    function = {"name": "f", "parameters": whole, "strict": True}
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": form}}),
        (CHAT, {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}),
        ("/v1/responses", {"input": "hi", "text": {"format": form}}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"format": form}}),
        ("/v1/messages", {"max_tokens": 9, "tools": [{"name": "f", "input_schema": whole}]}),
        ("/api/chat", {"format": whole, "stream": False}),
    ]

    async def main() -> None:
        async with served() as server:
            for path, body in asked:
                must = {"type": "any"} if path == "/v1/messages" else "required"
                body = {"tool_choice": must, **body} if "tools" in body else body
                answer = await ask(
                    server.app, path, {"model": "shardnet/default", "messages": HELLO, **body}
                )
                left_out = answer.headers.get("x-shardnet-schema-left-out")
                if answer.status == 200:  # forms that are never strict keep to the rest
                    assert path in ("/v1/messages", "/api/chat")
                    assert left_out == why.removeprefix("the number in ")
                else:
                    assert (answer.status, left_out) == (400, None)
                    assert why in str(answer.json["error"])

    asyncio.run(main())


def test_an_error_before_the_first_token_has_a_status_in_a_stream_too() -> None:
    async def main() -> None:
        async with served() as server:
            for is_stream in (False, True):
                body = {"messages": [{"role": "user", "content": "long"}], "stream": is_stream}
                answer = await ask(server.app, CHAT, body)
                assert answer.status == 400
                error = answer.json["error"]
                assert error["type"] == "exceed_context_size_error"
                assert error["code"] == "context_length_exceeded"
                assert "maximum context length is 64 tokens" in error["message"]
                assert (error["n_prompt_tokens"], error["n_ctx"]) == (99, 64)

    asyncio.run(main())


def test_a_body_may_be_packed_and_a_base_address_without_its_end_is_told() -> None:
    async def main() -> None:
        async with served() as server:
            raw = gzip.compress(msgspec.json.encode({"messages": HELLO}))
            packed = {"content-encoding": "gzip"}
            answer = await ask(server.app, CHAT, raw, headers=packed)
            assert answer.json["choices"][0]["message"]["content"] == "hello"
            cut = await ask(server.app, CHAT, raw[:-9], headers=packed)
            assert (cut.status, "cut off" in cut.json["error"]["message"]) == (400, True)
            other = await ask(server.app, CHAT, raw, headers={"content-encoding": "br"})
            assert (other.status, "send gzip" in other.json["error"]["message"]) == (400, True)
            bomb = gzip.compress(bytes((36 << 20) + 1))
            assert (await ask(server.app, CHAT, bomb, headers=packed)).status == 413
            told = await ask(server.app, "/chat/completions", {"messages": HELLO})
            assert told.status == 404
            assert "ask /v1/chat/completions" in told.json["error"]["message"]

    asyncio.run(main())


def test_aliases_are_other_names_of_models() -> None:
    async def main() -> None:
        aliases = {"gpt-4o": "big-llama", "*": "org/Tiny-Llama"}
        async with served(Settings(aliases=aliases)) as server:
            for name, model in (("gpt-4o", "org/Big-Llama"), ("o9", "org/Tiny-Llama")):
                answer = await ask(server.app, CHAT, {"messages": HELLO, "model": name})
                assert answer.json["model"] == model

    asyncio.run(main())


def test_a_model_of_a_folder_has_its_short_name_where_no_other_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = ("/srv/a.gguf", "/srv/b.gguf", "/old/b.gguf")
    monkeypatch.setattr(scripted_node, "MODELS", paths)

    async def main() -> None:
        async with served(Settings(aliases={"other": paths[0]})) as server:
            listed = (await ask(server.app, "/v1/models")).json["data"]
            names = ["shardnet/default", "a.gguf", *paths[1:], "other"]
            assert [model["id"] for model in listed] == names
            for name, found in (("a.gguf",) * 2, (paths[0], "a.gguf"), (paths[2],) * 2):
                body = {"messages": HELLO, "model": name}
                assert (await ask(server.app, CHAT, body)).json["model"] == found
            assert server.node.asked[-1].choice.model == paths[2]

    asyncio.run(main())


def test_a_model_is_found_by_its_name_or_those_that_would_do_are_named() -> None:
    async def main() -> None:
        async with served() as server:
            missing = await ask(server.app, CHAT, {"messages": HELLO, "model": "gpt-4"})
            assert missing.status == 404
            error = missing.json["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "shardnet/default, org/Tiny-Llama, org/Big-Llama" in error["message"]
            listed = (await ask(server.app, "/v1/models")).json["data"]
            names = ["shardnet/default", "org/Tiny-Llama", "org/Big-Llama"]
            assert [model["id"] for model in listed] == names

            for query, places, has_more in (
                ("limit=2", slice(2), True),
                ("limit=2&after_id=org/Tiny-Llama", slice(2, 3), False),
                ("limit=1&before_id=org/Big-Llama", slice(1, 2), True),
                ("after=org/Big-Llama", slice(0), False),
            ):
                page = (await ask(server.app, "/v1/models?" + query)).json
                assert [model["id"] for model in page["data"]] == names[places]
                assert page["has_more"] is has_more
            zeros = "0" * 8
            for query in (
                *("limit=0", "limit=x", "after_id=a"),
                *(f"limit={zeros}19999", f"limit={zeros}1{zeros * 999}"),
            ):
                wrong = await ask(server.app, "/v1/models?" + query)
                assert (wrong.status, wrong.json["error"]["param"]) == (400, query.split("=")[0])
            assert listed[1]["display_name"] == "Tiny-Llama"  # Anthropic's programs show it
            one = await ask(server.app, "/v1/models/org/Tiny-Llama")
            assert one.json["id"] == "org/Tiny-Llama"
            assert (one.json["created"], one.json["created_at"][:10]) == (86400, "1970-01-02")
            assert (await ask(server.app, "/v1/models/other")).status == 404

    asyncio.run(main())
