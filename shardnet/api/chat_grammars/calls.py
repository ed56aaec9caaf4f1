"""Calls whose arguments are a JSON object, in each family's format, and the Lark that all write.

Pure. Writes what chat_formats reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardnet.api.chat_formats.glm import suffix_of
from shardnet.api.chat_formats.json_text import Tool
from shardnet.api.chat_formats.marks import TokenText
from shardnet.constraints import MAX_CONSTRAINT_CHARACTERS
from shardnet.errors import UsageError
from shardnet.json_references import own_definitions
from shardnet.json_schemas import close_objects

_SLASH: Final = r"\/"
_ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spaced unless its schema says otherwise, as for every other constraint."""


class Lark:
    """One grammar. Its methods return expressions, which stand in the bodies of rules.

    A mark is its token where the tokenizer has one, as readers of calls want it, else its text.
    """

    def __init__(self, tokens: Mapping[int, TokenText]) -> None:
        self._ids = {token.text: token_id for token_id, token in tokens.items()}
        self.suffix = suffix_of(self._ids)
        """What each of Hunyuan's marks ends with."""
        self._rules: list[str] = []
        self._n_characters = 0

    def text(self, start: str) -> str:
        """Return the grammar whose whole output is the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def has(self, mark: str) -> bool:
        """Say whether a mark is a token."""
        return mark in self._ids

    def mark(self, mark: str) -> str:
        """Write a mark."""
        return f"<[{self._ids[mark]}]>" if mark in self._ids else self.literal(mark)

    def literal(self, text: str) -> str:
        """Write a text as it is."""
        return json.dumps(text, ensure_ascii=False)

    def any_of(self, expressions: Iterable[str]) -> str:
        """Write alternatives."""
        return self.rule(" | ".join(expressions))

    def rule(self, body: str, options: str = "") -> str:
        """Write a rule of its own; return its name."""
        name = f"r{len(self._rules)}"
        self.define(name + options, body)
        return name

    def define(self, name: str, body: str) -> None:
        """Write a rule that has a name. Raises UsageError where the grammar becomes too long."""
        self._rules.append(f"{name}: {body}")
        self._n_characters += len(self._rules[-1])
        if self._n_characters > MAX_CONSTRAINT_CHARACTERS:
            raise UsageError(
                f"a grammar of these tools has more than {MAX_CONSTRAINT_CHARACTERS} characters",
                remedy="give fewer tools or smaller schemas, or tool_choice auto",
            )

    def json(self, schema: Mapping[str, Any]) -> str:
        """Write JSON that is valid by a schema with closed objects. Raises UsageError for none."""
        said = schema.get("x-guidance", {})
        spaced = {**_ONE_LINE, **said} if isinstance(said, dict) else said
        try:
            closed = close_objects(schema)
            return self.rule("%json " + json.dumps({**closed, "x-guidance": spaced}))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the schema is no JSON: {error}") from error

    def text_to(self, end: str, before: str = "") -> str:
        """Write any text up to the mark `end`, and with it the text `before` that mark."""
        if self.has(end):
            # One expression: lexers take as much text as they can, what is before the mark too.
            return f"/(?s:.*){re.escape(before).replace('/', _SLASH)}/ {self.mark(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={self.literal(before + end)}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """What calls are written with: the grammar, the tools of which one is called, the template.

    Any number of calls may follow each other if it `is_parallel`; `has_answer` where JSON may stand
    in their place.
    """

    lark: Lark
    tools: Sequence[Tool]
    template: str
    is_parallel: bool
    has_answer: bool = False

    def one_of(self, write: Callable[[Tool], str]) -> str:
        """Write a call of any of the tools. Raises UsageError for references that lead nowhere."""
        return self.lark.any_of(write(_resolved(tool)) for tool in self.tools)

    def repeated(self, call: str, divider: str = "") -> str:
        """Write one call, or several with a divider between them."""
        if not self.is_parallel:
            return call
        between = f"{self.lark.literal(divider)} " if divider else ""
        return f"{call} ({between}{call})*"

    def arguments(self, tool: Tool) -> str:
        """Write a tool's arguments as a JSON object."""
        return self.lark.json({**tool.parameters, "type": "object"})

    def as_object(self, arguments: str = "arguments") -> str:
        """Write a call as an object with a name and what is called `arguments`."""

        def write(tool: Tool) -> str:
            begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
            return f'{self.lark.literal(begin)} {self.arguments(tool)} "}}"'

        return self.one_of(write)


def _resolved(tool: Tool) -> Tool:
    try:
        return Tool(tool.name, own_definitions(tool.given), is_own=True)
    except UsageError as error:
        raise error.at(f"tool {tool.name}") from None


def hermes(form: CallForm) -> str:
    """Write `<tool_call>`, an object and `</tool_call>` for each call."""
    lark = form.lark
    call = f'{lark.mark("<tool_call>")} "\\n" {form.as_object()} "\\n" {lark.mark("</tool_call>")}'
    return form.repeated(lark.rule(call), "\n")


def llama(form: CallForm) -> str:
    """Write one object: these models call one tool at a time.

    Beside JSON it has a tag before it: two objects that begin alike cannot be told apart.
    """
    call = form.as_object("parameters")
    if not form.has_answer:
        return call
    known = [tag for tag in ("<|python_tag|>", "<|python_start|>") if form.lark.has(tag)]
    return f"{form.lark.mark(known[0] if known else '<|python_tag|>')} {call}"


def mistral(form: CallForm) -> str:
    """Write a name and an object by marks for each call, or, before there were such, one list."""
    lark = form.lark
    calls = lark.mark("[TOOL_CALLS]")
    if "[ARGS]" not in form.template and not lark.has("[ARGS]"):
        return f'{calls} " "? {_list(form)}'

    def write(tool: Tool) -> str:
        name = lark.literal(tool.name)
        return f"{calls} {name} {lark.mark('[ARGS]')} {form.arguments(tool)}"

    return form.repeated(form.one_of(write))


def listed(form: CallForm) -> str:
    """Write a mark and a list of objects."""
    return f"{form.lark.mark('<|tool_call|>')} {_list(form)}"


def hunyuan(form: CallForm) -> str:
    """Write a list of objects between two marks."""
    return f"{form.lark.mark('<tool_calls>')} {_list(form)} {form.lark.mark('</tool_calls>')}"


def command(form: CallForm) -> str:
    """Write a list of objects with a number, between two marks."""
    lark = form.lark

    def write(tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        rest = lark.literal(f'", "tool_name": {name}, "parameters": ')
        return f'{lark.literal(_NUMBERED)} /[0-9]{{1,3}}/ {rest} {form.arguments(tool)} "}}"'

    calls = form.repeated(form.one_of(write), ",\n    ")
    first, last = lark.mark("<|START_ACTION|>"), lark.mark("<|END_ACTION|>")
    return f'{first} "[\\n    " {calls} "\\n]" {last}'


def apertus(form: CallForm) -> str:
    """Write a list of objects whose one key is the tool's name, between two marks."""
    lark = form.lark

    def write(tool: Tool) -> str:
        begin = lark.literal(f"{{{json.dumps(tool.name, ensure_ascii=False)}: ")
        return f'{begin} {form.arguments(tool)} "}}"'

    calls = form.repeated(form.one_of(write), ", ")
    return f'{lark.mark("<|tools_prefix|>")} "[" {calls} "]" {lark.mark("<|tools_suffix|>")}'


def glm4(form: CallForm) -> str:
    """Write a name and an object in the next line."""

    def write(tool: Tool) -> str:
        name = form.lark.literal(f"{tool.name}\n")
        return f"{name} {form.arguments(tool)}"

    return form.repeated(form.one_of(write), "\n")


def _list(form: CallForm) -> str:
    return f'"[" {form.repeated(form.as_object(), ", ")} "]"'


def harmony(form: CallForm) -> str:
    """Write the message of one call; its end is where these models stop."""
    lark = form.lark

    def write(tool: Tool) -> str:
        to = lark.literal(f"commentary to=functions.{tool.name} ")
        head = f'{lark.mark("<|channel|>")} {to} {lark.mark("<|constrain|>")} "json"'
        return f"{head} {lark.mark('<|message|>')} {form.arguments(tool)}"

    return form.one_of(write)


def deepseek(form: CallForm) -> str:
    """Write a section of calls: a name and an object by marks, in V3 with the object in a block."""
    lark = form.lark
    begin, separator = lark.mark("<｜tool▁call▁begin｜>"), lark.mark("<｜tool▁sep｜>")
    has_block = "```json" in form.template

    def write(tool: Tool) -> str:
        if not has_block:
            body = f"{lark.literal(tool.name)} {separator} {form.arguments(tool)}"
        else:
            name = lark.literal(f"{tool.name}\n```json\n")
            body = f'"function" {separator} {name} {form.arguments(tool)} "\\n```"'
        return f"{begin} {body} {lark.mark('<｜tool▁call▁end｜>')}"

    calls = form.repeated(form.one_of(write), "\n" if has_block else "")
    first, last = lark.mark("<｜tool▁calls▁begin｜>"), lark.mark("<｜tool▁calls▁end｜>")
    return f"{first} {calls} {last}"


def kimi(form: CallForm) -> str:
    """Write a section of calls, each with its number behind its name."""
    lark = form.lark

    def write(tool: Tool) -> str:
        name = f"{lark.literal(f'functions.{tool.name}:')} /[0-9]{{1,3}}/"
        head = f"{lark.mark('<|tool_call_begin|>')} {name}"
        body = f"{lark.mark('<|tool_call_argument_begin|>')} {form.arguments(tool)}"
        return f"{head} {body} {lark.mark('<|tool_call_end|>')}"

    first, last = lark.mark("<|tool_calls_section_begin|>"), lark.mark("<|tool_calls_section_end|>")
    return f"{first} {form.repeated(form.one_of(write))} {last}"


_NUMBERED: Final = '{"tool_call_id": "'
WRITERS: Final[Mapping[str, Callable[[CallForm], str]]] = {
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "list": listed,
    "harmony": harmony,
    "deepseek": deepseek,
    "kimi-k2": kimi,
    "hunyuan": hunyuan,
    "command": command,
    "apertus": apertus,
    "glm-4": glm4,
}
"""By the names of formats."""
