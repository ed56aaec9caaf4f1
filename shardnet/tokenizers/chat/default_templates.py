"""Chat templates of models whose makers give none, chosen by the tokens that a form needs.

DeepSeek's since V4 come with a program in place of a template: theirs has the marks and the order
that it writes, and instructions of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

_TEXT: Final = (
    "{% set text %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{{ part.text if part.type == 'text' else image }}"
    "{% endfor %}{% endif %}{% endset %}"
)
_DEEPSEEK: Final = """\
{%- set thinks = thinking if thinking is defined else enable_thinking | default(false) %}
{%- set ns = namespace(last=-1, asks=false, results=[]) %}
{%- for message in messages %}{% if message.role not in ('assistant', 'system') %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- set effort = (EFFORT) if thinks else '' %}
{{- 'SYSTEM' if effort or tools or messages[0].role == 'system' }}{{ effort }}
{%- for given in messages %}
{%- set message = ns.results[0] if ns.results else given %}
{%- set ns.results = ns.results[1:] %}TEXT
{%- if message.role == 'system' %}{% set ns.asks = false %}
{{- 'SYSTEM' if not loop.first }}{{ text }}{% endif %}
{%- if loop.first and tools %}
{{- '\\n\\n## Tools\\n\\nCall tools by a block of this form:\\n\\n<｜DSML｜CALLS>\\n' }}
{{- '<｜DSML｜_invoke name="TOOL">\\n<｜DSML｜_parameter name="KEY" string="true">VALUE' }}
{{- '</｜DSML｜_parameter>\\n</｜DSML｜_invoke>\\n</｜DSML｜CALLS>\\n\\nWrite a text as it is, ' }}
{{- 'and any other value as JSON with string="false". Reasoning stands between <think> and ' }}
{{- '</think>, before any call.\\n\\n### Available Tool Schemas\\n\\n' }}
{%- for tool in tools %}{{ tool.function | tojson }}{{ '\\n' }}{% endfor %}
{{- '\\nThe names and parameters of calls are those of these schemas.\\n' }}{% endif %}
{%- if message.role == 'assistant' %}{% set ns.asks = false %}{{ '<｜Assistant｜>' }}
{%- if thinks and (tools or loop.index0 > ns.last) %}
{{- '<think>' ~ (message.reasoning_content or '') }}{% endif %}{{ '</think>' ~ text }}
{%- set behind = messages[loop.index:][:message.tool_calls | length] %}
{%- for call in message.tool_calls %}
{%- set ns.results = ns.results + behind | selectattr('tool_call_id', 'eq', call.id) | list %}
{{- '\\n\\n<｜DSML｜CALLS>\\n' if loop.first }}
{{- '<｜DSML｜_invoke name="' ~ call.function.name ~ '">\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<｜DSML｜_parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') }}
{{- '">' ~ (value if value is string else value | tojson) ~ '</｜DSML｜_parameter>\\n' }}
{%- else %}{{ '\\n' }}{% endfor %}{{ '</｜DSML｜_invoke>\\n' }}
{{- '</｜DSML｜CALLS>' if loop.last }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- set ns.results = ns.results if ns.results | length == behind | length else [] %}
{%- elif message.role != 'system' %}{{ '\\n\\n' if ns.asks else '<｜User｜>' }}
{%- set ns.asks = true %}
{{- '<tool_result>' ~ text ~ '</tool_result>' if message.role == 'tool' else text }}{% endif %}
{%- endfor %}"""


def _deepseek(system: str, calls: str, space: str, effort: str) -> str:
    """Write DeepSeek's form: the mark of system messages, the name of a section of calls, what
    stands before names in its tags, and what an effort is told by.
    """
    source = _DEEPSEEK.replace("TEXT", _TEXT).replace("SYSTEM", system).replace("CALLS", calls)
    return source.replace("｜DSML｜_", f"｜DSML｜{space}").replace("EFFORT", effort)


_V4_EFFORT: Final = (
    "{'max': 'Reasoning Effort: max. Think as thoroughly as you can, and check all.\\n\\n'}"
    ".get(reasoning_effort, '')"
)
_V41_EFFORT: Final = (
    "'Reasoning Effort: ' ~ (reasoning_effort if reasoning_effort is number else {'minimal': 25, "
    "'low': 25, 'xhigh': 75, 'max': 100}.get(reasoning_effort, 50)) ~ ' (range 1-100)\\n\\n'"
)
_ENDS: Final = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜")
_THINKS: Final = "<｜Assistant｜>{{ '<think>' if thinks else '</think>' }}"


def _each(message: str) -> str:
    """Write messages as `message` says, which knows `text`."""
    return f"{{% for message in messages %}}{_TEXT}{message}{{% endfor %}}"


_FORMS: Final[Mapping[str, tuple[tuple[str, ...], str, str]]] = {
    "DeepSeek V4.1's form": (
        (*_ENDS, "<｜System｜>"),
        _deepseek("<｜System｜>", " calls", " ", _V41_EFFORT),
        _THINKS,
    ),
    "DeepSeek V4's form": (
        (*_ENDS, "<｜latest_reminder｜>"),
        _deepseek("", "tool_calls", "", _V4_EFFORT),
        _THINKS,
    ),
    "ChatML": (
        ("<|im_end|>", "<|im_start|>"),
        _each("<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n"),
        "<|im_start|>assistant\n",
    ),
    "Gemma's form": (
        ("<end_of_turn>", "<start_of_turn>"),
        _each(
            "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
            "{{ text }}<end_of_turn>\n"
        ),
        "<start_of_turn>model\n",
    ),
    "Llama 3's form": (
        ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        _each("<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ text }}<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Harmony": (
        ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        _each(
            "{% if loop.first %}<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: "
            "analysis, commentary, final. Channel must be included for every message.<|end|>"
            "{% endif %}<|start|>{{ 'developer' if message.role == 'system' else message.role }}"
            "{{ '<|channel|>final' if message.role == 'assistant' }}<|message|>{{ text }}<|end|>"
        ),
        "<|start|>assistant",
    ),
}
"""The tokens that a form needs, the one that ends an answer first; the messages of a conversation;
what an answer begins with.
"""
_PICTURES: Final = (
    ("<start_of_image>",),
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ("[IMG]",),
)
"""What may stand for a picture in these."""
_DIALOGUE: Final = (
    "{% for message in messages %}{% if message.role != 'system' %}"
    "{{ message.role | capitalize }}: {% endif %}{{ message.content or '' }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def default_template(added: Container[str]) -> tuple[str, str, str, str]:
    """Return the first form whose marks are `added` tokens, else a dialogue in plain text: its
    name, its source, what ends an answer, and what stands for a picture ("" for nothing).
    """
    name, source, stop = "a dialogue in plain text", _DIALOGUE, "\nUser:"
    for form, (marks, messages, begin) in _FORMS.items():
        if all(mark in added for mark in marks):
            source = f"{messages}{{% if add_generation_prompt %}}{begin}{{% endif %}}"
            name, stop = form, marks[0]
            break
    pictures = (marks for marks in _PICTURES if all(mark in added for mark in marks))
    return name, "{{ bos_token }}" + source, stop, next(map("".join, pictures), "")
