"""Conversations that a template does not take as they are, and what of them is to blame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.soak import cases
from support.template_texts import CODER, GLM, QWEN
from transformers.utils.chat_template_utils import render_jinja_template

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.chat.chat_template import (
    CONTINUES,
    ChatTemplate,
    TemplateOptions,
    TemplateProcess,
)

PRINTED = """{%- for message in messages %}{{ message.role }}:{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{% set args = call.function.arguments %}
{{- args if args is string else args | tojson }}{% endfor %};{% endfor %}"""
"""As Qwen 3's: it asks whether arguments are a text."""
HERMES = PRINTED.replace("args if args is string else args | tojson", "args | tojson")
JOINED = PRINTED.replace("args if args is string else args | tojson", "'```' + args + '```'")
"""As DeepSeek's: it takes nothing but a text."""
MAPPED = PRINTED.replace(
    "args if args is string else args | tojson",
    "args | items | map('first') | join if args is mapping",
)
"""As Qwen 3.5's later one: it leaves out silently what is no object."""

SHELL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "command": {"type": "string"}},
        },
    },
}
ONE_TOOL = TemplateOptions(tools=json.dumps([SHELL]))
CUT = '{"a": '


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """It runs before the first test begins."""
    process = TemplateProcess()
    assert process.render(template(""), []) == ""
    yield process
    process.close()


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, where="t.jinja", tokens={})


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call00001", "name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "call00001"},
    ]


def said(*roles: str) -> list[dict[str, Any]]:
    """Messages that say their number."""
    return [{"role": role, "content": f" {n} "} for n, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [(CUT, {"arguments": CUT}), ("", {}), (" \n", {}), ("[1]", {"arguments": "[1]"})],
)
@pytest.mark.parametrize("source", [GLM, CODER, HERMES, MAPPED])
def test_arguments_that_are_no_object_are_one_with_their_text(
    process: TemplateProcess, source: str, arguments: str, read: dict[str, str]
) -> None:
    shown = process.render(template(source), calling(arguments))
    assert shown == process.render(template(source), calling(json.dumps(read)))
    assert shown == transformers_text(source, calling(""), read)


def transformers_text(source: str, talk: list[dict[str, Any]], arguments: Any) -> str:
    function = {"name": "f", "arguments": arguments}
    talk[1]["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    [text], _ = render_jinja_template([talk], chat_template=source, add_generation_prompt=True)
    return str(text)


def test_the_text_is_that_of_a_parameter_which_is_one(process: TemplateProcess) -> None:
    shown = process.render(template(GLM), calling("ls -l"), ONE_TOOL)
    assert "<arg_key>command</arg_key><arg_value>ls -l</arg_value>" in shown


@pytest.mark.parametrize("arguments", [CUT, "[1]", '{"a": 1}'])
def test_a_template_that_takes_text_is_given_it_as_it_came(
    process: TemplateProcess, arguments: str
) -> None:
    assert arguments in process.render(template(PRINTED), calling(arguments))
    joined = process.render(template(JOINED), calling(arguments))
    assert joined == transformers_text(JOINED, calling(arguments), arguments)


@pytest.mark.parametrize("arguments", [CUT, '{"a": 1}'])
def test_a_template_that_knows_no_calls_is_given_a_text_where_there_is_none(
    process: TemplateProcess, arguments: str
) -> None:
    """As SmolLM2's, which adds the content of each message to its role."""
    source = "{% for one in messages %}{{ '|' + one['role'] + ':' + one['content'] }}{% endfor %}"
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "f", "arguments": arguments}],
        },
        {"role": "tool", "content": "42"},
    ]
    assert process.render(template(source), conversation) == "|user:hi|assistant:|tool:42"


def test_half_a_pair_in_arguments_is_a_character_of_its_own(process: TemplateProcess) -> None:
    shown = process.render(template(GLM), calling(r'{"a": "x\ud83d", "b": "\ud83d\ude00"}'))
    assert "<arg_value>x\ufffd</arg_value>" in shown
    assert "<arg_value>😀</arg_value>" in shown


@pytest.mark.parametrize(
    ("roles", "order"),
    [
        (("system", "system", "user"), [(0, 1), 2]),
        (("user", "system"), [(1,), 0]),
        (("system", "user", "assistant", "system", "user"), [(0, 3), 1, 2, 4]),
    ],
)
def test_system_messages_are_one_at_the_beginning_where_a_template_refuses_others(
    process: TemplateProcess, roles: tuple[str, ...], order: list[Any]
) -> None:
    talk = said(*roles)
    first, *others = order
    joined = {"role": "system", "content": "\n".join(talk[n]["content"] for n in first)}
    expected = process.render(template(QWEN), [joined, *(talk[n] for n in others)])
    assert process.render(template(QWEN), talk) == expected
    # A template that takes them gets them as they are, as in transformers.
    [text], _ = render_jinja_template([talk], chat_template=PRINTED)
    assert process.render(template(PRINTED), talk) == text


def test_system_messages_are_joined_where_a_template_fails_too(process: TemplateProcess) -> None:
    source = "{% for m in messages %}{{ (m.content if loop.first or m.role != 'system' else 1)"
    source += " + '|' }}{% endfor %}"
    assert process.render(template(source), said("system", "system", "user")) == " 0 \n 1 | 2 |"


def test_system_messages_of_parts_are_joined_to_parts(process: TemplateProcess) -> None:
    source = """{% for message in messages %}{% if message.role == 'system' and not loop.first %}
    {{ raise_exception('first') }}{% endif %}{% for part in message.content %}
    {{- part.text }},{% endfor %};{% endfor %}"""
    assert process.render(template(source), said("user", "system", "system")) == " 1 , 2 ,; 0 ,;"


def test_an_answer_that_goes_on_behind_two_system_messages_goes_on(
    process: TemplateProcess,
) -> None:
    options = TemplateOptions(values={CONTINUES: True})
    shown = process.render(template(QWEN), said("user", "system", "assistant"), options)
    assert shown == (
        "<|im_start|>system\n1<|im_end|>\n<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n2"
    )
    with pytest.raises(UsageError, match="System message must be at the beginning"):
        process.render(template(QWEN), said("user", "system"), options)


@pytest.mark.parametrize(
    "source",
    [
        QWEN.replace("messages[0].content", "''"),  # it would leave them out silently
        QWEN.replace("== 'system' %}", "== 'system' and raise_exception('it takes none') %}"),
    ],
)
def test_a_refusal_is_told_in_its_first_words(process: TemplateProcess, source: str) -> None:
    with pytest.raises(UsageError, match="refuses these messages: System message must be at"):
        process.render(template(source), said("user", "system"))


@pytest.mark.parametrize("bad", [1, 5, 8])
def test_the_message_that_a_template_fails_at_is_named(process: TemplateProcess, bad: int) -> None:
    talk = said(*["user", "assistant"] * 5)
    talk[bad]["content"] = None
    source = "\n{% for message in messages %}{{ 'x' + message.content }}{% endfor %}"
    with pytest.raises(UsageError) as caught:
        process.render(template(source), talk)
    assert str(caught.value).startswith(
        f"message {bad + 1} of 10 ({talk[bad]['role']}) cannot be shown by the chat template "
        "(t.jinja line 2: TypeError: "
    )


@pytest.mark.parametrize(
    ("source", "talk", "options", "words"),
    [
        (
            "{% for tool in tools or [] %}{{ tool.function.name + '' }}{% endfor %}",
            said("user"),
            TemplateOptions(tools=json.dumps([SHELL, SHELL, {}, SHELL])),
            "tool 3 of 4 cannot be shown",
        ),
        (
            "{{ 'a' + style if style is defined }}",
            said("user"),
            TemplateOptions(values={"style": 3}),
            "an option or the tools of this request cannot be shown",
        ),
        ("{{ messages[0].content }}{{ messages[0].a.b }}", [], None, "CheckpointError"),
        ("{{ messages[0].content }}", [], None, "a conversation without messages cannot be"),
        (
            "{% for i in range(9000) %}{{ messages[0].role * 10**6 }}{% endfor %}",
            said("user"),
            None,
            "CheckpointError",
        ),
        (
            "{% if messages[1:] %}{{ messages[0].role * 10**10 }}{% endif %}",
            said("user", "assistant"),
            None,
            "message 2 of 2 (assistant) cannot be shown by the chat template "
            "(t.jinja: it needs more than 1024 MiB)",
        ),
    ],
)
def test_what_a_request_brings_is_its_own_fault(
    process: TemplateProcess,
    source: str,
    talk: list[dict[str, Any]],
    options: TemplateOptions | None,
    words: str,
) -> None:
    with pytest.raises((UsageError, CheckpointError)) as caught:
        process.render(template(source), talk, options or TemplateOptions())
    assert words in f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    "source",
    cases(
        [
            "{% if messages[1:] %}{% for i in range(90000) %}{% for j in range(90000) %}"
            "{% endfor %}{% endfor %}{% endif %}"
        ],
        ["{% if messages[1:] %}{{ 10 ** (messages | length * 10 ** 9) }}{% endif %}"],
    ),
)
def test_what_takes_too_long_is_the_conversation_where_a_plain_one_does_not(source: str) -> None:
    process = TemplateProcess()
    try:
        with pytest.raises(UsageError, match=r"this conversation is too much for .* after 1 s"):
            process.render(template(source), said("user", "assistant"), seconds=1)
    finally:
        process.close()
