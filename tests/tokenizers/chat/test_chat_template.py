"""Chat templates: found where checkpoints keep them, as transformers renders them, and bounded."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.soak import cases
from transformers.utils.chat_template_utils import render_jinja_template

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.chat.chat_template import (
    CONTINUES,
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    TemplateOptions,
    TemplateProcess,
)

SHORT_TALK = [{"role": "user", "content": ' Hello <there> & "you"\n'}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello\nyou"},
    {"role": "user", "content": "  Go on — ünïcode 🙂 "},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- set date = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nYear: " + date + "\\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""
TURNS = """{%- set ns = namespace(found=0) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set ns.found = ns.found + 1 -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' ~ role ~ '\\n' ~ (message['content'] | trim) ~ '<end_of_turn>\\n' }}
{%- endfor -%}
{{ ns.found }}{{ {'a': [1, 'é<']} | tojson }}{% if tools %}tools{% endif %}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""


PATIENCE_S = 120
"""Processor time for templates that are good: much more than any takes."""


def make_template(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, where="chat_template.jinja", tokens=TOKENS)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """One for all tests that do not end it; it runs before the first begins."""
    process = TemplateProcess()
    assert process.render(make_template("a"), TALK, seconds=PATIENCE_S) == "a"
    yield process
    process.close()


@pytest.fixture
def own_process() -> Iterator[TemplateProcess]:
    """One for a test that ends it."""
    process = TemplateProcess()
    yield process
    process.close()


@pytest.mark.parametrize("messages", [SHORT_TALK, TALK])
@pytest.mark.parametrize("source", [CHATML, HEADERS, INST, TURNS])
def test_a_template_gives_the_text_that_transformers_gives(
    process: TemplateProcess, source: str, messages: list[dict[str, str]]
) -> None:
    [expected], _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert process.render(make_template(source), messages, seconds=PATIENCE_S) == expected


@pytest.mark.parametrize("begun", ["Hello\n you", " Hello ", "", "a" * 9])
@pytest.mark.parametrize("source", [CHATML, INST, TURNS])
def test_a_last_message_goes_on_as_in_transformers(
    process: TemplateProcess, source: str, begun: str
) -> None:
    talk = [*SHORT_TALK, {"role": "assistant", "content": begun}]
    [expected], _ = render_jinja_template(
        [talk], chat_template=source, continue_final_message=True, **TOKENS
    )
    options = TemplateOptions(values={CONTINUES: True})
    made = process.render(make_template(source), talk, options, seconds=PATIENCE_S)
    assert made == expected
    with pytest.raises(UsageError, match="does not show the last message"):
        process.render(make_template("a"), talk, options, seconds=PATIENCE_S)


def test_texts_are_parts_for_templates_that_show_no_others(process: TemplateProcess) -> None:
    """As SmolVLM's: what was said before a picture came would not be there."""
    template = make_template(
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>"
        "{% endif %}{% endfor %};{% endfor %}"
    )
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    said = [*TALK[:3], {"role": "user", "content": parts}]
    shown = "system:Be brief.;user:Hi;assistant:Hello\nyou;user:<image>What?;"
    assert process.render(template, said, seconds=PATIENCE_S) == shown
    options = TemplateOptions(values={CONTINUES: True})
    shown = shown.partition("you;")[0] + "you"
    assert process.render(template, TALK[:3], options, seconds=PATIENCE_S) == shown


@pytest.mark.parametrize(("parts", "shown"), [("ti", "Hi <image>"), ("it", "<image>Hi ")])
def test_a_message_of_parts_that_goes_on_ends_with_the_last_one(
    process: TemplateProcess, parts: str, shown: str
) -> None:
    written = {"t": {"type": "text", "text": "Hi "}, "i": {"type": "image"}}
    said = [{"role": "assistant", "content": [written[part] for part in parts]}]
    template = make_template(
        "{% for part in messages[0].content %}{{ part.text or '<image>' }}{% endfor %}<end>"
    )
    options = TemplateOptions(values={CONTINUES: True})
    assert process.render(template, said, options, seconds=PATIENCE_S) == shown
    with pytest.raises(UsageError, match="no last message"):
        process.render(template, [], options, seconds=PATIENCE_S)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for x in messages %}\n{% if %}", "line 2: "),
        ("\n\n{{ messages[0].nothing.more }}", "line 3: UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "needs more than 1024 MiB"),
        ("{{ 'a' | center(10**10) }}", "needs more than 1024 MiB"),
        ("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", "grows beyond 8388608 bytes"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without end"),
    ],
)
def test_what_a_template_may_not_do_is_named(
    process: TemplateProcess, source: str, words: str
) -> None:
    pid = process.pid
    with pytest.raises(CheckpointError, match=r"^chat_template\.jinja") as caught:
        process.render(make_template(source), SHORT_TALK, seconds=PATIENCE_S)
    assert words in str(caught.value)
    assert process.pid == pid


@pytest.mark.parametrize(
    "source",
    cases(
        ["{{ 10 ** (10 ** 9) }}"],
        ["{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"],
    ),
)
def test_a_template_that_takes_too_long_is_given_up(
    own_process: TemplateProcess, source: str
) -> None:
    """The next is rendered by another process."""
    with pytest.raises(CheckpointError, match="not done after 1 s"):
        own_process.render(make_template(source), SHORT_TALK, seconds=1)
    assert own_process.pid is None
    assert own_process.render(make_template("b"), TALK, seconds=PATIENCE_S) == "b"


def test_a_process_that_gets_no_processor_is_waited_for(process: TemplateProcess) -> None:
    """It is the template's own time that counts."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(1.2, os.kill, (process.pid, signal.SIGCONT)).start()
    assert process.render(make_template("{{ messages | length }}"), SHORT_TALK, seconds=1) == "1"


def test_a_template_may_refuse_messages_in_its_own_words(process: TemplateProcess) -> None:
    template = make_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        process.render(template, TALK, seconds=PATIENCE_S)


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'b': 1, 'a': 'é'} | tojson(true) }}",
        "{{ {'b': 1, 'a': 'é'} | tojson(false, 2) }}",
        "{{ {'b': 1, 'a': 'é'} | tojson(true, none, (',', ':')) }}",
        "{{ {'b': 1, 'a': 'é'} | tojson(false, none, none, true) }}",
        "{{ {'b': 1, 'a': 'é'} | tojson(indent=1, separators=(', ', '='), sort_keys=true) }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% set n = namespace(self=1) %}{% generation %}{% set n.self = 2 %}{% endgeneration %}"
        "{{ n.self }}{{ dict(a=1) }}{{ dict.fromkeys(['x'], 1) }}{{ dict.mro is defined }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    ],
)
def test_a_template_finds_what_transformers_has_for_it(
    process: TemplateProcess, source: str
) -> None:
    pair = [*SHORT_TALK, *SHORT_TALK]
    [text], _ = render_jinja_template([pair], chat_template=source)
    assert process.render(make_template(source), pair, seconds=PATIENCE_S) == text


@pytest.mark.parametrize(
    "source", ["{{ namespace(_a=1) }}", "{% set n = namespace() %}{% set n._a = 1 %}"]
)
def test_a_namespace_has_no_names_of_python_s_own(process: TemplateProcess, source: str) -> None:
    with pytest.raises(CheckpointError, match="SecurityError"):
        process.render(make_template(source), SHORT_TALK, seconds=PATIENCE_S)


def test_the_environment_of_the_node_is_not_there(
    own_process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would jinja2 give it: two walls."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = make_template("{{ HF_TOKEN }}{{ environ }}|")
    assert own_process.render(template, TALK, seconds=PATIENCE_S) == "|"
    environ = Path(f"/proc/{own_process.pid}/environ")
    assert not environ.exists() or b"secret" not in environ.read_bytes()


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "B"}, "chat_template.json": {}}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D|T",
        ),
        (
            {
                "chat_template.jinja": "A",
                "additional_chat_templates/tool_use.jinja": "T",
                "additional_chat_templates/rag.jinja": "R",
            },
            "A|T",
        ),
    ],
)
def test_where_templates_are_found(files: dict[str, Any], source: str, tmp_path: Path) -> None:
    for name, said in files.items():
        text = said if isinstance(said, str) else json.dumps(said)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = ChatTemplate.find(tmp_path)
    assert "|".join(filter(None, (found.source, found.with_tools))) == source


def test_tools_are_shown_by_the_template_that_is_for_them(process: TemplateProcess) -> None:
    """As in Hermes 2 Pro, Hermes 3 and Command R: the other one knows none."""
    template = replace(make_template("plain"), with_tools="{{ tools[0].name }}")
    for tools, shown in (("", "plain"), ("[]", "plain"), ('[{"name": "f"}]', "f")):
        options = TemplateOptions(tools=tools)
        assert process.render(template, TALK, options, seconds=PATIENCE_S) == shown


def test_special_tokens_come_from_the_files_beside_it(
    process: TemplateProcess, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<a>", "eos_token": "<b>"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<c>", "lstrip": false}, "pad_token": null}'
    )
    template = process.find(tmp_path)
    assert process.render(template, TALK, seconds=PATIENCE_S) == "<a>|<c>|"


@pytest.mark.parametrize(
    ("added", "stops", "text"),
    [
        (
            ("<|im_start|>", "<|im_end|>"),
            ("<|im_end|>",),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello\nyou<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            ("<start_of_turn>", "<end_of_turn>"),
            ("<end_of_turn>",),
            "<start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHello\nyou<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            ("<|eot_id|>",),
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello\nyou<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
            ("<|return|>",),
            "<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, "
            "commentary, final. Channel must be included for every message.<|end|>"
            "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello\nyou<|end|><|start|>assistant",
        ),
        (
            ("<|im_start|>",),
            ("\nUser:",),
            "Be brief.\n\nUser: Hi\n\nAssistant: Hello\nyou\n\nAssistant:",
        ),
    ],
)
def test_what_stands_in_for_a_template(
    added: tuple[str, ...], stops: tuple[str, ...], text: str, process: TemplateProcess
) -> None:
    template = ChatTemplate.default(added, "<s>")
    assert template.stops == stops
    assert process.render(template, TALK[:3], seconds=PATIENCE_S) == f"<s>{text}"


def test_what_stands_in_for_a_template_shows_pictures(process: TemplateProcess) -> None:
    template = ChatTemplate.default(("<|im_start|>", "<|im_end|>", "[IMG]"), "")
    said = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    text = process.render(template, [{"role": "user", "content": said}], seconds=PATIENCE_S)
    expected = "<|im_start|>user\nWhat is [IMG]?<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


PHI = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""
CHANNELS = """{% for message in messages %}<|start|>{{ message.role }}<|message|>
{{- message.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"""
RESPONSES = """{% for message in messages %}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>
<|END_OF_TURN_TOKEN|>{% endfor %}"""
ROLES = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
PARTS = """{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}
{{- part.text }}{% endfor %}<|im_end|>
{% endfor %}"""
CALLS_BEHIND = """{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>
{% for call in message.tool_calls or [] %}call: {{ call.function | tojson }}<|end|>
{% endfor %}{% endfor %}"""
"""As GigaChat3's: the call of a turn is a message of its own."""
CALLS_WITHIN = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<|start|>{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endfor %}"""
THOUGHTS_BEFORE = """{% for message in messages %}
{%- if message.reasoning_content %}think: {{ message.reasoning_content }}<|end|>{% endif %}
{{- message.role }}: {{ message.content }}<|end|>{% endfor %}"""
NO_ANSWER = """{% for message in messages %}{% if message.role == 'assistant' %}
{{- raise_exception('no') }}{% endif %}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (CHATML, "<|im_end|>"),
        (HEADERS, "<|eot|>"),
        (INST, "</s>"),
        (PHI, "<|end|>"),
        (PARTS, "<|im_end|>"),
        (CHANNELS, None),
        (RESPONSES, None),
        (ROLES, None),
        (CALLS_BEHIND, None),
        (THOUGHTS_BEFORE, None),
        (CALLS_WITHIN, "<|im_end|>"),
        (NO_ANSWER, None),
        ("{{ nothing.at.all }}", None),
        ("{{ messages[-1].content }} END", None),
    ],
)
def test_the_token_that_ends_an_answer(
    process: TemplateProcess, source: str, end: str | None
) -> None:
    """Whoever answers it: where the end of the text adds another token, or makes it another one."""
    added = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|start|>", "<|end|>")
    added += ("<|message|>", "<|return|>", "<|user|>", "<|assistant|>", "<|END_RESPONSE|>")
    template = ChatTemplate(source=source, where="t", tokens=TOKENS)
    assert process.find_end(template, (*added, "<|END_OF_TURN_TOKEN|>")) == end
    assert process.find_end(template, ()) is None


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [
        ("nothing", "", UsageError, "has no chat template"),
        ("tokenizer_config.json", "{", CheckpointError, "not readable as JSON"),
        ("tokenizer_config.json", "[1]", CheckpointError, "expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', CheckpointError, "neither a template"),
        ("chat_template.json", '{"chat_template": [{"name": "x"}]}', CheckpointError, "default"),
        ("chat_template.jinja", "a" * (MAX_TEMPLATE_BYTES + 1), CheckpointError, "at most 1048576"),
    ],
)
def test_files_that_hold_no_template_are_named(
    name: str, text: str, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=words) as caught:
        ChatTemplate.find(tmp_path)
    assert str(tmp_path) in str(caught.value)
