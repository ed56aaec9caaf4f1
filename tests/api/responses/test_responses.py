"""Responses: what items mean, how answers, streams and errors are written, what Codex asks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.servers.asgi_client import Exchanged, ask
from support.servers.http_app import served

from shardnet.api.chat.request import ChatTurn
from shardnet.api.responses.body import ResponseBody, response_request
from shardnet.api.responses.responses import failed_event
from shardnet.api.server.bodies import decode_body
from shardnet.api.server.errors import HttpError, fault_of
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings
from shardnet.constraints import Constraint
from shardnet.errors import ContextExceededError, QueueFullError
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

RESPONSES = "/v1/responses"
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
OTHER = {**SHELL, "name": "plan"}


def request(**fields: Any) -> Any:
    raw = msgspec.json.encode(fields)
    return response_request(decode_body(raw, ResponseBody), ModelChoice(model="m"))


def user(*texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": "user", "content": parts}


def call(name: str, call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "call_id": call_id, **fields}


def test_items_are_turns() -> None:
    asked = request(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "no network"},
            user("a", "b"),
            user("c"),
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look", "annotations": []}],
            },
            call("shell", "c1", arguments='{"cmd": 1}'),
            {"type": "custom_tool_call", "name": "patch", "call_id": "c2", "input": "*** x"},
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "done"}],
            },
            {"type": "function_call_output", "call_id": "c9", "output": {"success": True}},
        ],
    )
    calls = (
        ToolCall(id="c1", name="shell", arguments='{"cmd": 1}'),
        ToolCall(id="c2", name="patch", arguments='{"input": "*** x"}'),
    )
    assert asked.turns == (
        ChatTurn(role="system", content="be brief\nno network"),
        ChatTurn(role="user", content="a\nb\nc"),
        ChatTurn(role="assistant", content="I look", reasoning="hm", tool_calls=calls),
        ChatTurn(role="tool", content="ok", tool_call_id="c1", name="shell"),
        ChatTurn(role="tool", content="done", tool_call_id="c2", name="patch"),
        ChatTurn(role="tool", content='{"success": true}', tool_call_id="c9"),
    )
    assert request(input="hi").turns == (ChatTurn(role="user", content="hi"),)
    for empty in ("", [], None):
        assert request(input=empty).turns == (ChatTurn(role="user"),)


def test_options_have_the_names_of_responses() -> None:
    plain = request(input="a")
    assert (plain.sampling.temperature, plain.sampling.n_logprobs) == (1.0, None)
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "array"}, "strict": True}
    asked = request(
        input="a",
        max_output_tokens=7,
        reasoning={"effort": "xhigh", "summary": "auto"},
        text={"verbosity": "low", "format": schema},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        store=False,
        service_tier="auto",
        top_k=3,
    )
    assert asked.options["max_tokens"] == 7
    assert asked.options["constraint"] == Constraint(kind="json_schema", text='{"type": "array"}')
    hard = {"enable_thinking": True, "thinking": True, "reasoning_effort": "xhigh"}
    assert asked.template_options == hard
    assert request(input="a", reasoning={"summary": "auto"}).template_options == {}
    assert (asked.sampling.n_logprobs, asked.sampling.top_k) == (0, 3)
    thoughtless = request(input="a", reasoning={"effort": "none"})
    assert thoughtless.template_options == {"enable_thinking": False, "thinking": False}
    tools = [SHELL, OTHER, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    for choice, meant in (
        (None, ("auto", "", ["shell", "plan"])),
        ("required", ("required", "", ["shell", "plan"])),
        ({"type": "function", "name": "plan"}, ("required", "plan", ["shell", "plan"])),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [OTHER]},
            ("required", "", ["plan"]),
        ),
    ):
        asked = request(input="a", tools=tools, tool_choice=choice)
        names = [tool.name for tool in asked.tools]
        assert (asked.tool_choice, asked.forced_tool, names) == meant


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [call("f", "")]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [SHELL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [SHELL]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(HttpError) as caught:
        request(**{"input": "a", **fields})
    assert (caught.value.fault.status, caught.value.fault.parameter) == (400, parameter)
    assert parameter in caught.value.fault.message


def test_an_answer_and_its_stream_say_the_same() -> None:
    words = (
        '<think>hm</think>I look.<tool_call>{"name": "shell", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "shell", "arguments": {}}</tool_call>'
    )

    def kept(response: dict[str, Any]) -> dict[str, Any]:
        for item in response["output"]:
            assert item.pop("id")
            item.pop("call_id", None)
        return {**response, "id": "", "created_at": 0}

    async def main() -> None:
        async with served() as server:
            body = {
                "model": "tiny-llama",
                "instructions": "be brief",
                "input": [user(words)],
                "tools": [SHELL],
                "metadata": {"a": "b"},
            }
            answer = (await ask(server.app, RESPONSES, body)).json
            assert answer["id"].startswith("resp_")
            assert (answer["object"], answer["status"]) == ("response", "completed")
            assert (answer["model"], answer["metadata"]) == ("org/Tiny-Llama", {"a": "b"})
            assert answer["error"] is answer["incomplete_details"] is None
            thought, said, first, second = answer["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
            assert (thought["type"], thought["summary"]) == ("reasoning", [])
            [part] = said["content"]
            assert (said["role"], part["type"], part["text"]) == (
                "assistant",
                "output_text",
                "I look.",
            )
            assert (first["type"], first["name"]) == ("function_call", "shell")
            assert (first["arguments"], second["arguments"]) == ('{"a": 1}', "{}")
            assert first["call_id"] != second["call_id"]
            assert {item["status"] for item in answer["output"]} == {"completed"}
            usage = answer["usage"]
            assert (usage["input_tokens"], usage["input_tokens_details"]) == (
                2,
                {"cached_tokens": 1},
            )
            assert usage["output_tokens_details"]["reasoning_tokens"] == len("<think>hm")

            exchanged = await ask(server.app, RESPONSES, {**body, "stream": True})
            events = exchanged.events
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            names = [
                line[7:] for line in exchanged.content.decode().split("\n") if "event:" in line
            ]
            assert names == [event["type"] for event in events]
            assert names[:2] == ["response.created", "response.in_progress"]
            assert (events[0]["response"]["status"], events[0]["response"]["output"]) == (
                "in_progress",
                [],
            )
            assert kept(events[-1]["response"]) == kept(answer)
            assert names[-1] == "response.completed"
            told: list[dict[str, Any]] = []
            for event in events:
                kind = event["type"].removeprefix("response.")
                if kind == "output_item.added":
                    assert event["output_index"] == len(told)
                    told.append({"first": event["item"], "text": "", "kinds": []})
                elif kind.endswith(".delta"):
                    told[event["output_index"]]["text"] += event["delta"]
                    assert event["item_id"] == told[event["output_index"]]["first"]["id"]
                elif kind == "output_item.done":
                    told[event["output_index"]]["last"] = event["item"]
                if "output_index" in event:
                    told[event["output_index"]]["kinds"].append(kind)
            assert [one["text"] for one in told] == ["hm", "I look.", '{"a": 1}', "{}"]
            assert told[1]["kinds"][:2] == ["output_item.added", "content_part.added"]
            assert told[1]["kinds"][-3:] == [
                "output_text.done",
                "content_part.done",
                "output_item.done",
            ]
            assert told[2]["first"]["arguments"] == ""
            assert told[2]["last"]["arguments"] == '{"a": 1}'

    asyncio.run(main())


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_call_that_is_cut_off_is_none(finish: str, status: str) -> None:
    """Its item is incomplete, and neither in the response nor in what is kept of it."""

    async def main() -> None:
        whole = '<tool_call>{"name": "shell", "arguments": {}}</tool_call>'
        begun = '<tool_call>{"name": "shell", "arguments": {"a": "' + 600 * "x"
        async with served() as server:
            server.node.finish_reason = finish
            for words, n_whole, statuses in (
                (begun, 0, ["incomplete"]),
                (whole + begun, 1, ["completed", "incomplete"]),
                (whole, 1, ["completed"]),
            ):
                body = {"input": [user(words)], "tools": [SHELL]}
                answer = (await ask(server.app, RESPONSES, body)).json
                events = (await ask(server.app, RESPONSES, {**body, "stream": True})).events
                items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
                assert [item["status"] for item in items] == statuses
                assert events[-1]["type"] == f"response.{status}"
                streamed = events[-1]["response"]
                for response in (answer, streamed):
                    assert response["status"] == status
                    assert [item["status"] for item in response["output"]] == [
                        "completed"
                    ] * n_whole
                output = [{"type": "function_call_output", "call_id": "c", "output": "b"}] * n_whole
                more = {"input": [*output, user("c")], "previous_response_id": streamed["id"]}
                assert (await ask(server.app, RESPONSES, more)).status == 200
                turns = server.node.asked[-1].messages or ()
                assert sum(len(turn.tool_calls) for turn in turns) == n_whole

    asyncio.run(main())


def test_errors_have_a_status_but_a_prompt_that_is_too_long_for_a_stream() -> None:
    async def main() -> None:
        async with served() as server:
            error = (await ask(server.app, RESPONSES, {"input": "long"})).json["error"]
            assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 64)
            streamed = await ask(server.app, RESPONSES, {"input": "long", "stream": True})
            [event] = streamed.events
            assert (streamed.status, event["type"]) == (200, "response.failed")
            assert event["response"]["error"]["code"] == "context_length_exceeded"
            failed = await ask(server.app, RESPONSES, {"input": "fail", "stream": True})
            assert (failed.status, "no room" in failed.json["error"]["message"]) == (400, True)

    asyncio.run(main())
    for failure, code in (
        (ContextExceededError.of("a", 99, 64), "context_length_exceeded"),
        (QueueFullError("full"), "busy"),
    ):
        name, data = failed_event(fault_of(failure)).decode().strip().split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert name == "event: response.failed"
        assert (event["response"]["status"], event["response"]["error"]["code"]) == ("failed", code)


def test_a_request_follows_a_response_that_is_kept_for_its_key() -> None:
    async def main() -> None:
        keys = Keyring([parse_key(text, 1) for text in ("ann:one", "ben:two")])
        async with served(Settings(keys=keys)) as server:

            async def told(key: str = "one", **body: Any) -> Exchanged:
                return await ask(server.app, RESPONSES, body, headers=header(key))

            tool = {"tools": [SHELL], "instructions": "be brief"}
            words = '<think>hm</think>I look.<tool_call>{"name": "shell", "arguments": {}}'
            first = (await told(input=words + "</tool_call>", **tool)).json
            called = first["output"][-1]["call_id"]
            output = {"type": "function_call_output", "call_id": called, "output": "b"}
            body = {"input": [output], "previous_response_id": first["id"], "stream": True}
            second = (await told(**body)).events[-1]["response"]
            assert (second["previous_response_id"], second["store"]) == (first["id"], True)
            third = (await told(input="c", previous_response_id=second["id"], store=False)).json
            turns = [(m.role, m.content or "") for m in server.node.asked[-1].messages or ()]
            assert [role for role, _ in turns] == ["user", "assistant", "tool", "assistant", "user"]
            assert [text for _, text in turns[1:]] == ["I look.", "b", "b", "c"]

            named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
            fourth = await told(input=[user("a"), *named, output, user("c")])
            assert fourth.status == 200
            turns = [(m.role, m.content or "") for m in server.node.asked[-1].messages or ()]
            assert [role for role, _ in turns] == ["user", "assistant", "tool", "user"]
            assert [text for _, text in turns] == ["a", "I look.", "b", "c"]
            [asked] = [m for m in server.node.asked[-1].messages or () if m.role == "assistant"]
            assert [c.id for c in asked.tool_calls] == [called]
            for key, item in (
                ("two", named[0]),
                ("one", {"type": "item_reference", "id": "msg_x"}),
            ):
                answer = await told(key, input=[user("a"), item])
                assert (answer.status, answer.json["error"]["param"]) == (400, "input[1].id")

            path = f"{RESPONSES}/{second['id']}"
            assert (await ask(server.app, path, headers=header("one"))).json == second
            assert (await ask(server.app, path, headers=header("two"))).status == 404
            how = {"method": "DELETE", "headers": header("one")}
            assert (await ask(server.app, path, **how)).json["deleted"]
            assert (await ask(server.app, path, **how)).status == 404
            for key, gone in (("two", first), ("one", second), ("one", third)):
                refused = await told(key, input="c", previous_response_id=gone["id"])
                error = refused.json["error"]
                assert (refused.status, error["code"]) == (400, "previous_response_not_found")
                assert "send the whole conversation as input" in error["message"]

    asyncio.run(main())


def test_a_call_by_a_name_that_no_tool_has_can_be_followed() -> None:
    """Where the model does not end a name, what follows is refused by field."""

    async def main() -> None:
        async with served() as server:
            for name, status in (("other", 200), ("x" * 300, 400)):
                text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
                body = {"input": text, "tools": [SHELL]}
                first = (await ask(server.app, RESPONSES, body)).json
                assert first["output"][0]["name"] == name
                more = {"input": "b", "previous_response_id": first["id"]}
                second = await ask(server.app, RESPONSES, more)
                assert second.status == status
            assert "tool_calls[0].name is text of 300" in second.json["error"]["message"]

    asyncio.run(main())


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
