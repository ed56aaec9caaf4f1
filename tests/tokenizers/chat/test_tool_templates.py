"""Chat templates with tools: the text that transformers gives, in the manner of each family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shardnet.api.chat.request import thinking_options
from shardnet.errors import UsageError
from shardnet.tokenizers.chat.chat_template import ChatTemplate, TemplateOptions, TemplateProcess

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather — now",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": 'Zürich "old"', "days": 2, "deep": {"a": [1, None, True]}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should look.",
        "tool_calls": [{"id": "call00001", "name": "get_weather", "arguments": ARGUMENTS}],
    },
    {"role": "tool", "content": "20 °C", "tool_call_id": "call00001", "name": "get_weather"},
]

# What is typical of each family: tools as JSON in a system message, calls as JSON or by argument.
MARKED = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and enable_thinking is not false %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}{% set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
BY_ARGUMENT = """{%- macro shape(schema, depth) %}{{ schema.type }}{% for name, inner in
(schema.properties or {}) | items %} {{ name }}:{{ shape(inner, depth + 1) }}{% endfor %}
{%- endmacro %}
{%- for tool in tools %}{{ tool.function.name }} {{ shape(tool.function.parameters, 0) }}
{% endfor %}
{%- for message in messages if message.role == "assistant" %}{% for call in message.tool_calls %}
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson | safe }}
</parameter>
{%- endfor %}
</function>{% endfor %}{% endfor %}"""
LISTED = """{{ bos_token }}{% if tools is not none and tools | length > 0 %}[AVAILABLE_TOOLS]
{{- tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls is defined %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson | trim("}") }}, "id": "{{ call.id }}"}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS]{"content": {{ message.content | tojson }},
 "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}[INST]{{ message["content"] }}[/INST]{% endif %}{% endfor %}"""
CHANNELS = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}
{%- if tools %} # Tools {% for tool in tools %}{{ tool.function.description }}
{%- for name, value in tool.function.parameters.properties.items() %} {{ name }}: {{ value.type }}
{%- endfor %}{% endfor %}{% endif %}<|end|>
{%- for message in messages %}
{%- if "tool_calls" in message %}{% set call = message.tool_calls[0].function %}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == "tool" %}<|start|>functions.{{ message.name }} to=assistant<|message|>
{{- message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

ELEMENTS = """{%- set seen = namespace(asked="") %}]~b]system
{{ messages[0].content }}{% for tool in tools %}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>{% endfor %}[e~[
{%- for message in messages[1:] %}
{%- if message.role == "assistant" %}
]~b]ai
{% if message.reasoning_content %}<think>{{ message.reasoning_content.strip(".") }}</think>
{%- endif %}
{%- for call in message.tool_calls %}<minimax:tool_call>
<invoke name="{{ call.function.name }}">
{%- for key, value in call.function.arguments.items() %}
<parameter name="{{ key }}">
{{- value if value is string else value | tojson(ensure_ascii=False) }}</parameter>
{%- endfor %}
</invoke>
</minimax:tool_call>{% endfor %}[e~[
{%- elif message.role == "user" %}{% set seen.asked = message.content %}
{%- else %}
]~b]tool {{ seen.asked.split("?")[0] }}
<response>{{ message.content }}</response>[e~[{% endif %}{% endfor %}"""
PYTHON_LIST = """{%- if tools %}List of tools: [
{%- for tool in tools %}{{ tool.function if tool.function is defined else tool | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls %}<|tool_call_start|>[{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %})]<|tool_call_end|>{% endfor %}
{{- message.content or "" }}<|im_end|>
{% endfor %}"""


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """It runs before the first test begins."""
    process = TemplateProcess()
    empty = ChatTemplate(source="", where="t", tokens={})
    assert process.render(empty, []) == ""
    yield process
    process.close()


def told(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As messages travel: a call's arguments are JSON text."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in talk
    ]


def nested(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As transformers expects messages."""
    return [
        {
            **message,
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in talk
    ]


@pytest.mark.parametrize(
    "values", [{}, {"enable_thinking": False, "reasoning_effort": "high", "unused": 1.5}]
)
@pytest.mark.parametrize("source", [MARKED, BY_ARGUMENT, LISTED, CHANNELS, ELEMENTS, PYTHON_LIST])
def test_tools_and_calls_give_the_text_that_transformers_gives(
    process: TemplateProcess, source: str, values: dict[str, Any]
) -> None:
    [expected], _ = render_jinja_template(
        [nested(TALK)],
        chat_template=source,
        tools=TOOLS,
        add_generation_prompt=True,
        **TOKENS,
        **values,
    )
    options = TemplateOptions(tools=json.dumps(TOOLS), values=values)
    template = ChatTemplate(source=source, where="chat_template.jinja", tokens=TOKENS)
    assert process.render(template, told(TALK), options) == expected
    assert "get_weather" in expected or source is CHANNELS


THINKS = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
EMPTY_THOUGHT = "{{ enable_thinking is defined and enable_thinking is false }}"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("{{ enable_thinking | default(false) }}", ("False", "False", "True", "True")),  # Gemma 4
        (EMPTY_THOUGHT, ("False", "True", "False", "False")),  # Qwen3, GLM, SmolLM3
        (THINKS, ("False", "False", "True", "True")),  # DeepSeek V3.1, Granite
        ("{{ reasoning_effort | default('medium') }}", ("medium", "medium", "medium", "high")),
        *((source, None) for source in (BY_ARGUMENT, LISTED, ELEMENTS, PYTHON_LIST)),
    ],
)
def test_how_hard_to_think_reaches_the_templates_that_read_it_and_no_other(
    process: TemplateProcess, source: str, texts: tuple[str, ...] | None
) -> None:
    template = ChatTemplate(source=source, where="chat_template.jinja", tokens=TOKENS)
    told_apart = [
        process.render(
            template,
            told(TALK),
            TemplateOptions(tools=json.dumps(TOOLS), values=thinking_options(wanted)),
        )
        for wanted in (None, "none", True, "xhigh")
    ]
    assert told_apart == (4 * told_apart[:1] if texts is None else [*texts])


STRICT = """{%- set effort = reasoning_effort | default('xhigh') %}
{%- if enable_thinking is defined and not enable_thinking %}off
{%- elif effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('what is ' ~ effort) }}
{%- else %}{{ effort }}{% endif %}"""
NO_THINK = """{%- set effort = reasoning_effort if reasoning_effort is defined else 'DEFAULT' %}
{%- if effort not in WORDS %}{{ raise_exception('what is ' ~ effort) }}{% endif %}{{ effort }}"""
HY3 = NO_THINK.replace("DEFAULT", "no_think").replace("WORDS", "['high', 'low', 'no_think']")
HY4 = NO_THINK.replace("DEFAULT", "high").replace("WORDS", "['high', 'no_think']")
MISTRAL = NO_THINK.replace("DEFAULT", "none").replace("WORDS", "['none', 'high']")
OTHER_NONE = "{{ reasoning_effort | default('medium') }}{{ 'x' if tool_choice == 'none' }}"
GLM = "{{ reasoning_effort if reasoning_effort | default('') in ['low', 'high'] else 'max' }}"
MAXIMAL = "{{ 'more' if thinking and reasoning_effort == 'max' else thinking }}"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (STRICT, "xhigh off xhigh low low medium xhigh xhigh xhigh"),  # Qwen 3.8
        (HY3, "no_think no_think high low low high high high high"),
        (HY4, "high no_think high high high high high high high"),
        (MISTRAL, "none none high high high high high high high"),
        (OTHER_NONE, "medium medium medium low low medium high high high"),
        (GLM, "max max max low low max high high max"),
        (MAXIMAL, " False True True True True True True more"),  # DeepSeek V4
    ],
)
def test_an_effort_that_a_template_does_not_know_is_the_nearest_that_it_knows(
    process: TemplateProcess, source: str, texts: str
) -> None:
    template = ChatTemplate(source=source, where="chat_template.jinja", tokens=TOKENS)
    efforts = (None, "none", True, "minimal", "low", "medium", "high", "xhigh", "max")
    said = [{"role": "user", "content": "Hi"}]
    given = [TemplateOptions(values=thinking_options(effort)) for effort in efforts]
    assert [process.render(template, said, each) for each in given] == texts.split(" ")
    odd = TemplateOptions(values={"reasoning_effort": "odd"})
    if source in (STRICT, HY3, HY4):
        with pytest.raises(UsageError, match="what is odd"):
            process.render(template, said, odd)


CALL = """<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Zürich "old"</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
<｜DSML｜parameter name="deep" string="false">{"a": [1, null, true]}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""

ORDER = {"c": "third", "a": "first", "b": "second"}


@pytest.mark.parametrize("is_new", [False, True], ids=["V4", "V4.1"])
def test_deepseeks_without_a_template_are_asked_in_the_form_of_their_makers(
    process: TemplateProcess, is_new: bool
) -> None:
    system = "<｜System｜>" if is_new else ""
    marks = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜")
    template = ChatTemplate.default((*marks, system or "<｜latest_reminder｜>"), "<s>")
    assert template.stops == ("<｜end▁of▁sentence｜>",)
    call = CALL
    if is_new:
        for old, new in (("tool_calls", " calls"), ("invoke", " invoke"), ("param", " param")):
            call = call.replace(f"｜DSML｜{old}", f"｜DSML｜{new}")

    def text(talk: list[dict[str, Any]], tools: str = "", **values: Any) -> str:
        return process.render(template, told(talk), TemplateOptions(tools=tools, values=values))

    said = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    talk = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "q"}]
    past = "<｜User｜>q<｜Assistant｜></think>a<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜>"
    assert text(talk) == f"<s>{past}</think>"
    assert text(talk, enable_thinking=False) == f"<s>{past}</think>"
    usual = "<｜System｜>Reasoning Effort: 50 (range 1-100)\n\n" if is_new else ""
    assert text(talk, thinking=True) == f"<s>{usual}{past}<think>"
    hard = text(TALK[:2], thinking=True, reasoning_effort="max")
    assert re.fullmatch(
        rf"<s>{system}Reasoning Effort: (max|100).*\n\nBe brief.*<think>", hard, re.S
    )
    assert text(TALK[:2]) == f"<s>{system}Be brief.<｜User｜>Weather?<｜Assistant｜></think>"
    twice = [*talk[:1], {"role": "user", "content": [{"type": "text", "text": "r"}]}]
    assert text(twice) == "<s><｜User｜>q\n\nr<｜Assistant｜></think>"

    calls = [*TALK[2]["tool_calls"], {"id": "2", "name": "get_weather", "arguments": {}}]
    used = [*TALK[:2], {**TALK[2], "tool_calls": calls}, TALK[3], {**TALK[3], "content": "wet"}]
    whole = text(used, json.dumps(TOOLS), thinking=True)
    assert whole.startswith(f"<s>{usual or system}Be brief.\n\n## Tools\n\n")
    assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in whole
    assert whole.endswith(
        f"<｜User｜>Weather?<｜Assistant｜><think>I should look.</think>\n\n{call}"
        "<｜end▁of▁sentence｜><｜User｜><tool_result>20 °C</tool_result>\n\n"
        "<tool_result>wet</tool_result><｜Assistant｜><think>"
    )
    answers = [{"role": "tool", "content": say, "tool_call_id": key} for key, say in ORDER.items()]
    asked = [*talk[:1], {**said, "tool_calls": [dict(calls[1], id=key) for key in "abc"]}]
    sorted_by_calls = "".join(f"\n\n<tool_result>{ORDER[key]}</tool_result>" for key in "abc")
    assert sorted_by_calls.replace("\n\n", "<｜User｜>", 1) in text([*asked, *answers, *talk[:1]])
    as_given = "<tool_result>third</tool_result>\n\n<tool_result>first</tool_result>"
    assert f"<｜User｜>{as_given}\n\nq<｜A" in text([*asked, *answers[:2], *talk[:1]])
    alone = text(talk[:1], json.dumps(TOOLS))
    assert alone.startswith(f"<s>{system}\n\n## Tools")


@pytest.mark.parametrize("arguments", ["{broken", '"text"', "[1]", "{" * 70])
def test_arguments_that_are_no_object_reach_the_template_as_they_came(
    process: TemplateProcess, arguments: str
) -> None:
    template = ChatTemplate(
        source="{{ messages[0].tool_calls[0].function.arguments }}", where="t", tokens={}
    )
    call = {"id": "", "name": "f", "arguments": arguments}
    talk = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert process.render(template, talk) == arguments


@pytest.mark.parametrize(
    ("tools", "values", "words"),
    [
        ("{", {}, "the tools cannot be read"),
        ('{"a": 1}', {}, "list of objects"),
        ("[1]", {}, "list of objects"),
        ("[" + '{"a":' * 64 + "1" + "}" * 64 + "]", {}, "nested 65 deep"),
        ("", {"messages": 1}, "'messages' is not the name"),
        ("", {"bos_token": "x"}, "'bos_token' is not the name"),
        ("", {"a b": 1}, "'a b' is not the name"),
    ],
)
def test_tools_and_options_that_cannot_be_used_are_the_clients_fault(
    process: TemplateProcess, tools: str, values: dict[str, Any], words: str
) -> None:
    template = ChatTemplate(source="x", where="t", tokens=TOKENS)
    options = TemplateOptions(tools=tools, values=values)
    with pytest.raises(UsageError, match=words):
        process.render(template, [{"role": "user", "content": ""}], options)
