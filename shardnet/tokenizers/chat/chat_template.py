"""A checkpoint's chat template, its text and special tokens, rendered in a helper process.

Its files are a stranger's: they are read in the process that renders it (template_program.py).
Models whose makers give none have one by the tokens that its form needs. DeepSeek's since V4 come
with a program in place of a template: theirs here has the marks and the order that it writes, and
instructions of its own.

Blocks: for threads that may wait.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_file, read_json
from shardnet.checkpoint.tensors.manifest import TOOL_TEMPLATE
from shardnet.errors import CheckpointError, UsageError
from shardnet.files import decode_text
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits

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


MAX_TEMPLATE_BYTES = 2**20
_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
AGAIN = "fetch the checkpoint again, or give the prompt without a template"

OF_TOOLS: Final = "tool_use"
"""What transformers calls the template for requests with tools, where there are several."""
CONTINUES = "continue_final_message"
"""The option with which a prompt ends within the last message."""
_HARMONIES: Final = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
"""What ends a turn in Harmony and its relatives."""

TemplateMessage = Mapping[str, Any]
"""`role`, `content` and what else the message has. Its `tool_calls` are maps with `id`, `name` and
`arguments`, the JSON text of an object."""

OptionValue: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a template gets beside messages: `tools`, the JSON text of a list of objects or "" for
    none, and values such as `enable_thinking` by their names.
    """

    tools: str = ""
    values: Mapping[str, OptionValue] = field(default_factory=dict)


NO_OPTIONS = TemplateOptions()
PLAIN: Final[Sequence[TemplateMessage]] = ({"role": "user", "content": "Hello"},)
"""A conversation that every template shows, unless the template itself is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A jinja2 template, its source file, and the special tokens it may use.

    At one of the texts `stops` an answer ends, beside the model's own ends. Requests with tools are
    shown by `with_tools`, if its makers have one of its own for these.
    """

    source: str
    where: str
    tokens: Mapping[str, str]
    stops: Sequence[str] = ()
    with_tools: str = ""

    @classmethod
    def default(cls, added: Container[str], bos: str) -> ChatTemplate:
        """Make the template of a model that has none: of the first form whose marks are `added`
        tokens, else a dialogue in plain text. Prompts begin with `bos`.
        """
        name, source, stop, picture = default_template(added)
        tokens = {"bos_token": bos, "image": picture}
        return cls(source=source, where=name, tokens=tokens, stops=(stop,))

    @classmethod
    def find(cls, folder: Path, own: ChatTemplate | None = None) -> ChatTemplate:
        """Find the template of a checkpoint folder.

        It is the first of `chat_template.jinja` (with that for tools in a folder beside it),
        `chat_template` in tokenizer_config.json (one, or of several those named "default" and
        "tool_use"), chat_template.json, and `own`, that of the tokenizer's file. Raises UsageError
        if there is none, CheckpointError for an unreadable or invalid file.
        """
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _special_tokens(folder, config)
        file = folder / "chat_template.jinja"
        if has_file(file):
            for_tools = folder / TOOL_TEMPLATE
            return cls(
                source=_read_text(file),
                where=str(file),
                tokens=tokens,
                with_tools=_read_text(for_tools) if has_file(for_tools) else "",
            )
        for name, content in (
            ("tokenizer_config.json", config),
            ("chat_template.json", _read_json(folder / "chat_template.json")),
        ):
            if content.get("chat_template") is not None:
                where = f"{folder / name}: chat_template"
                source, with_tools = _named(content["chat_template"], where)
                return cls(source=source, where=where, tokens=tokens, with_tools=with_tools)
        if own is not None:
            return own
        raise UsageError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): it is not a chat model",
            remedy="give the prompt without --chat",
        )


def ends_turn(token: str, known: Container[str]) -> bool:
    """Say whether a token that ends messages ends a turn: not <|end|> where other tokens do, behind
    which another message of the same turn may follow.
    """
    return token != "<|end|>" or not any(all(m in known for m in marks) for marks in _HARMONIES)


def split_tokens(text: str, added: Iterable[str]) -> list[str]:
    """Split a text at the tokens `added` to a tokenizer, the longest first; drop white space."""
    marks = sorted((mark for mark in added if mark and mark in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return [part for part in parts if part.strip()]


def _named(value: object, where: str) -> tuple[str, str]:
    """Return the template, of several the one named default, and "" or that of tools."""
    with_tools: object = ""
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value, with_tools = named.get("default"), named.get(OF_TOOLS, "")
    if not isinstance(value, str) or not isinstance(with_tools, str):
        raise CheckpointError(
            f"{where} is neither a template nor a list with one named default",
            remedy=AGAIN,
        )
    return value, with_tools


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the files define, by their names in templates."""
    found = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in _TOKEN_NAMES:
            token = source.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing."""
    return read_json(path) if has_file(path) else {}


def _read_text(path: Path) -> str:
    try:
        return decode_text(read_file(path, MAX_TEMPLATE_BYTES))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read ({error})", remedy=AGAIN) from error


RENDER_S = 5
"""Limit of a template's processor time, in seconds; wall time would depend on other load."""
WAIT_FACTOR = 12
"""Limit of wall time, as a multiple of that: for systems that do not limit processor time."""
RENDER_MEMORY_BYTES = 2**30
MAX_REPLY_BYTES = 128 * 2**20

_MODULE = "shardnet.tokenizers.chat.template_program"


class TemplateProcess:
    """Finds and renders chat templates, one at a time. Starts its process at the first."""

    def __init__(self) -> None:
        self._process = HelperProcess(_MODULE)

    @property
    def pid(self) -> int | None:
        """The id of the process, None if none runs."""
        return self._process.pid

    def find(self, folder: Path, own: ChatTemplate | None = None) -> ChatTemplate:
        """Find the template of a checkpoint folder as `ChatTemplate.find`, which says the errors.

        Raises CheckpointError too for files that take too long or too much memory to read.
        """
        arguments = {"folder": str(folder), "own": None if own is None else asdict(own)}
        return ChatTemplate(**self._call("find", arguments, str(folder)))

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        options: TemplateOptions = NO_OPTIONS,
        *,
        seconds: int = RENDER_S,
    ) -> str:
        """Render the conversation to a prompt, up to the start of the model's reply.

        `seconds` limits processor time. Raises UsageError for messages that the template refuses,
        with its own text, for tools and options that cannot be used, and for a conversation that
        makes a template fail or exceed its time or memory which shows a plain one; CheckpointError
        for a template that fails with that too.
        """
        try:
            return str(self._render(template, messages, options, seconds))
        except JobFailedError as error:
            why = _failure(error, template.where, seconds)
        try:
            self._render(template, PLAIN, NO_OPTIONS, seconds)
        except (JobFailedError, CheckpointError):
            raise CheckpointError(why, remedy=AGAIN) from None
        except UsageError:
            pass  # a template that refuses messages is none that fails
        raise UsageError(
            f"this conversation is too much for the chat template: {why}", remedy="shorten it"
        )

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        options: TemplateOptions,
        seconds: int,
    ) -> Any:
        """Render in the process. Raises as `render`, and JobFailedError."""
        arguments = {
            "template": asdict(template),
            "messages": [dict(message) for message in messages],
            "options": asdict(options),
            "memory_bytes": RENDER_MEMORY_BYTES,
        }
        return self._process.call("render", arguments, _limits(seconds))[0]

    def find_end(self, template: ChatTemplate, added: Collection[str]) -> str | None:
        """Find the one token, among the `added` ones, that ends each of an assistant's messages.

        None where that is text, or several tokens, or there is none, and where a call of the same
        turn may follow it. Raises CheckpointError for a template that exceeds its time or memory.
        """
        behind, within = self._call("behind", {"template": asdict(template)}, template.where)
        both = [split_tokens(text, added) for text in behind]
        common = [token for token, *others in zip(*both, strict=False) if {token} >= {*others}]
        is_end = len(common) == 1 and common[0] in added and common[0] not in within
        return common[0] if is_end else None

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _call(self, job: str, arguments: Mapping[str, Any], where: str) -> Any:
        """Do a job that depends on no request. Raises CheckpointError where it fails."""
        try:
            return self._process.call(job, arguments, _limits(RENDER_S))[0]
        except JobFailedError as error:
            raise CheckpointError(_failure(error, where, RENDER_S), remedy=AGAIN) from None


def _limits(seconds: int) -> JobLimits:
    return JobLimits(
        cpu_s=seconds,
        wall_s=float(WAIT_FACTOR * seconds),
        memory_bytes=RENDER_MEMORY_BYTES,
        reply_bytes=MAX_REPLY_BYTES,
    )


def _failure(error: JobFailedError, where: str, seconds: int) -> str:
    """Say why a job of the process was not done."""
    if error.out_of_time:
        return f"{where} was not done after {seconds} s"
    return f"{where}: the chat template failed: {error}"
