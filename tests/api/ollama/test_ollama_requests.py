"""What the bodies of Ollama's programs mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardnet.api.chat.request import ChatRequest, ChatTurn
from shardnet.api.ollama.body import OllamaChat, OllamaGenerate
from shardnet.api.ollama.generating import chat_request, generate_request, keep_of
from shardnet.api.server.bodies import decode_body
from shardnet.api.server.errors import HttpError
from shardnet.api.switching.model_switch import MOST_S, Keep
from shardnet.constraints import Constraint
from shardnet.types import MAX_POSITIONS
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

MODEL = ModelChoice(model="m")
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    raw = msgspec.json.encode({"model": "m", "messages": HELLO, **fields})
    return chat_request(decode_body(raw, OllamaChat), MODEL)


def generate(**fields: Any) -> ChatRequest:
    raw = msgspec.json.encode({"model": "m", "prompt": "hello", **fields})
    return generate_request(decode_body(raw, OllamaGenerate), MODEL)


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"at": 1}}, **more}


def test_calls_and_results_without_ids_belong_together() -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [called("sun"), called("rain")]},
        {"role": "tool", "tool_name": "rain", "content": "wet"},
        {"role": "tool", "content": "hot"},
        {"role": "assistant", "content": "so", "tool_calls": [called("sun", id="c7")]},
        {"role": "tool", "tool_call_id": "c7", "content": "dim"},
    ]
    tools = [{"type": "function", "function": {"name": "sun"}}, {"type": "web_search"}]
    asked = chat(messages=messages, tools=tools)
    sun, rain, named = (
        ToolCall(id=call_id, name=name, arguments='{"at":1}')
        for call_id, name in (("000000001", "sun"), ("000000002", "rain"), ("c7", "sun"))
    )
    assert asked.turns == (
        ChatTurn(role="system", content="be kind"),
        ChatTurn(role="assistant", reasoning="hm", tool_calls=(sun, rain)),
        ChatTurn(role="tool", tool_call_id="000000002", name="rain", content="wet"),
        ChatTurn(role="tool", tool_call_id="000000001", content="hot"),
        ChatTurn(role="assistant", content="so", tool_calls=(named,)),
        ChatTurn(role="tool", tool_call_id="c7", content="dim"),
    )
    assert [tool.name for tool in asked.tools] == ["sun"]


def test_options_have_ollamas_names_and_defaults() -> None:
    plain = chat(options={"num_predict": -1, "num_ctx": 4096.0, "mirostat": 0}, keep_alive="5m")
    drawn = plain.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p) == (0.8, 40, 0.9)
    assert (drawn.repetition_penalty, drawn.min_p, drawn.n_logprobs) == (1.0, 0.0, None)
    assert drawn.seed != chat(options={"seed": -1}).sampling.seed
    assert plain.options["max_tokens"] == MAX_POSITIONS
    assert (plain.options["constraint"], plain.template_options) == (None, {})
    options = {
        "num_predict": 5.0,
        "temperature": 0,
        "top_k": 3.0,
        "top_p": 0,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x", "y"],
        "repeat_penalty": 1.1,
    }
    asked = chat(options=options, think="low", logprobs=True, top_logprobs=2)
    drawn = asked.sampling
    drawn.check()
    assert (drawn.temperature, drawn.top_k, drawn.min_p, drawn.seed) == (0, 3, 0.1, 7)
    assert (drawn.repetition_penalty, drawn.n_logprobs) == (1.1, 2)
    assert (asked.options["max_tokens"], asked.options["stop"]) == (5, ["x", "y"])
    thinking = {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert asked.template_options == thinking
    assert chat(options={"seed": 7.0}).sampling.seed == 7
    assert chat(options={"seed": 2**62 + 1}).sampling.seed == 2**62 + 1
    switched = {"enable_thinking": True, "thinking": True}
    assert chat(think=True).template_options == switched
    assert chat(think="max").template_options == {**switched, "reasoning_effort": "max"}
    for off in (False, "none"):
        thoughtless = {"enable_thinking": False, "thinking": False}
        assert chat(think=off).template_options == generate(think=off).template_options
        assert chat(think=off).template_options == thoughtless


def test_formats_are_constraints() -> None:
    assert chat(format="").options["constraint"] is None
    assert chat(format="json").options["constraint"] == Constraint(kind="json")
    by_schema = generate(format={"type": "array"})
    expected = Constraint(kind="json_schema", text='{"type": "array"}')
    assert by_schema.options["constraint"] == expected
    assert by_schema.template_options["enable_thinking"] is False  # the form has no room for it
    assert chat(format="json", think=True).template_options["enable_thinking"] is True


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["a"]}]},
            "messages[0].images[0]",
        ),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"format": "xml"}, "format"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat(**fields)
    assert (caught.value.fault.status, caught.value.fault.parameter) == (400, parameter)


@pytest.mark.parametrize(
    "fields",
    [
        {"template": "{{ .Prompt }}"},
        {"context": [1, 2]},
        {"system": "be kind", "raw": True},
    ],
)
def test_what_a_generation_cannot_do_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(HttpError) as caught:
        generate(**fields)
    assert caught.value.fault.parameter == next(iter(fields))


def test_a_generation_is_a_conversation() -> None:
    asked = generate(system="be kind")
    assert [turn.role for turn in asked.turns] == ["system", "user"]
    assert asked.turns[1].content == "hello"


def test_a_model_is_kept_for_a_year_at_most() -> None:
    assert [keep_of(given) for given in (1e300, "99999999h")] == [Keep(MOST_S)] * 2
