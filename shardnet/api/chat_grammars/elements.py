"""Calls that have an element for each argument, in the format of each family.

Pure. Writes what chat_formats reads: text stands in its element as it is, all else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from shardnet.api.chat_formats.json_text import Tool
from shardnet.api.chat_formats.qwen_xml import MINIMAX, QWEN, SEED, Words
from shardnet.api.chat_grammars.calls import CallForm, Lark
from shardnet.json_references import merged

_ANY_KEY: Final = "/[A-Za-z0-9_.-]{1,64}/"
_QUOTE: Final = '<|"|>'
_MOST_DEPTH: Final = 8
"""Of schemas within each other that are kept to; deeper values may be anything."""
_INTEGER: Final = "-?(0|[1-9][0-9]{0,17})"


def _xml(words: Words, newline: str, form: CallForm) -> str:
    """Write a function with a parameter for each argument, between two marks.

    `newline` stands before and behind each value.
    """
    lark = form.lark
    end = f"{newline}</parameter>\n"

    def write(tool: Tool) -> str:
        inside = "".join(
            _times(f"{lark.literal(words.parameter)} {key} {rest} {value}", times)
            for key, value, _, times in _arguments(
                lark, tool, text=lambda: lark.text_to(end), end=lark.literal(end)
            )
        )
        begin = lark.literal(f"{words.function}{tool.name}{words.quote}>\n")
        return f"{begin} {inside}{lark.literal(words.end)}"

    rest = lark.literal(f"{words.quote}>{newline}")
    begin, close = lark.mark(words.open), lark.mark(words.close)
    call = lark.rule(f'{begin} "\\n" {form.one_of(write)} "\\n" {close}')
    return form.repeated(call, "\n")


def glm(form: CallForm, *, in_section: bool = False) -> str:
    """Write a name, then keys and values between marks; Hunyuan's calls are `in_section`."""
    lark = form.lark

    def mark(name: str) -> str:
        return lark.mark(f"<{name}{lark.suffix}>")

    def write(tool: Tool) -> str:
        inside = "".join(
            _times(
                f'{mark("arg_key")} {key} {mark("/arg_key")} "\\n"? '
                f'{mark("arg_value")} {value} "\\n"?',
                times,
            )
            for key, value, _, times in _arguments(
                lark,
                tool,
                text=lambda: lark.text_to(f"</arg_value{lark.suffix}>"),
                end=mark("/arg_value"),
            )
        )
        return f'{lark.literal(tool.name)} {divider} "\\n"? {inside}'

    divider = f"{mark('tool_sep')}?" if "tool_sep" in form.template else ""
    call = f"{mark('tool_call')} {form.one_of(write)} {mark('/tool_call')}"
    if not in_section:
        return form.repeated(lark.rule(call), "\n")
    calls = form.repeated(lark.rule(f'{call} "\\n"?'))
    return f'{mark("tool_calls")} "\\n"? {calls} {mark("/tool_calls")}'


def dsml(form: CallForm) -> str:
    """Write a section with an `invoke` for each call and a `parameter` for each argument."""
    lark = form.lark
    word = next((each for each in _SECTIONS if f"{each}>" in form.template), _SECTIONS[0])
    space = " " * word.startswith(" ")  # V4.1 has one before each name

    def tag(text: str, begin: str = "<") -> str:
        return f"{lark.literal(begin)} {lark.mark('｜DSML｜')} {lark.literal(text)}"

    def text() -> str:
        if not lark.has("｜DSML｜"):
            return lark.text_to(f"</｜DSML｜{space}parameter>\n")
        return f'{lark.text_to("｜DSML｜", "</")} "{space}parameter>\\n"'

    def write(tool: Tool) -> str:
        inside = "".join(
            _times(f"{parameter} {key} {kinds[is_text]} {value}", times)
            for key, value, is_text, times in _arguments(
                lark, tool, text=text, end=tag(f"{space}parameter>\n", "</")
            )
        )
        begin = tag(f'{space}invoke name="{tool.name}">\n')
        return f"{begin} {inside}{tag(f'{space}invoke>', '</')}"

    parameter = tag(f'{space}parameter name="')
    kinds = [lark.literal(f'" string="{is_text}">') for is_text in ("false", "true")]
    calls = form.repeated(form.one_of(write), "\n")
    return f"{tag(word + '>')} {lark.literal(chr(10))} {calls} {tag(word + '>', chr(10) + '</')}"


_SECTIONS: Final = ("function_calls", "tool_calls", " calls")
"""What V3.2, V4 and V4.1 call a section of calls."""


def _times(element: str, times: str) -> str:
    return f"({element}){times} " if times else f"{element} "


def _arguments(
    lark: Lark, tool: Tool, *, text: Callable[[], str], end: str
) -> list[tuple[str, str, bool, str]]:
    """Return each argument of a tool: its key, its value with the end of the element, whether that
    is text, and how often it may come ("" once, ? or *). `text` writes any text and that end.
    """
    properties = tool.properties
    if properties is None:
        return [(_ANY_KEY, text(), True, "*")]
    found, needed = [], _needed(tool)
    for name, schema in properties.items():
        types = tool.types_of(name)
        is_text = not types or "string" in types
        if texts := _texts(schema, tool):
            value = f"{lark.any_of(map(lark.literal, texts))} {end}"
        elif is_text:
            value = text()
        else:
            value = f"{lark.json(_lifted(schema, tool))} {end}"
        found.append((lark.literal(name), value, is_text, "" if name in needed else "?"))
    return found


def _needed(tool: Tool) -> Sequence[Any]:
    """Return the names of the arguments that must be given."""
    needed: Sequence[Any] = tool.whole.get("required", ())
    return needed


def _texts(schema: object, tool: Tool) -> list[str]:
    """Return the texts of which a value must be one, none if it may be another."""
    said = merged(schema, tool.parameters)
    listed = [said["const"]] if "const" in said else said.get("enum")
    is_texts = isinstance(listed, list) and all(isinstance(one, str) for one in listed)
    return listed if isinstance(listed, list) and is_texts else []


def _lifted(schema: object, tool: Tool) -> dict[str, Any]:
    """Return the schema of a part of the arguments, with the definitions that it refers to."""
    own = schema if isinstance(schema, Mapping) else {}
    return {**own, "$defs": tool.parameters.get("$defs", {})}


def _part(schema: Mapping[str, Any], tool: Tool) -> Tool:
    """Return what has this schema of a part of the arguments."""
    return Tool("", _lifted(schema, tool), is_own=True)


def gemma(form: CallForm) -> str:
    """Write an object with bare keys, whose strings stand between two equal marks."""
    lark = form.lark
    values = _BareValues(lark)

    def write(tool: Tool) -> str:
        return f"{lark.literal(f'call:{tool.name}')} {values.object_of(tool, _MOST_DEPTH)}"

    call = f"{lark.mark('<|tool_call>')} {form.one_of(write)} {lark.mark('<tool_call|>')}"
    return form.repeated(lark.rule(call))


def lfm2(form: CallForm) -> str:
    """Write a list of calls as in Python, whose values are JSON, between two marks."""
    lark = form.lark
    calls = form.repeated(_python_call(form), ", ")
    return f'{lark.mark("<|tool_call_start|>")} "[" {calls} "]" {lark.mark("<|tool_call_end|>")}'


def olmo(form: CallForm) -> str:
    """Write a line for each such call, between two marks."""
    lark = form.lark
    calls = form.repeated(_python_call(form), "\n")
    first, last = lark.mark("<function_calls>"), lark.mark("</function_calls>")
    return f'{first} "\\n" {calls} "\\n" {last}'


def _python_call(form: CallForm) -> str:
    lark = form.lark

    def write(tool: Tool) -> str:
        properties, needed = tool.properties, _needed(tool)
        if properties is None:
            pair = f'{_ANY_KEY} "=" {lark.json({})}'
            inside = f'({pair} ("," {pair})*)?'
        else:
            inside = _divided(
                lark,
                [
                    (
                        f"{lark.literal(name + '=')} {lark.json(_lifted(schema, tool))}",
                        name in needed,
                    )
                    for name, schema in properties.items()
                ],
            )
        return f'{lark.literal(tool.name + "(")} {inside} ")"'

    return lark.rule(form.one_of(write))


class _BareValues:
    """The values of Gemma's calls, by schemas down to some depth."""

    def __init__(self, lark: Lark) -> None:
        self._lark = lark
        self._written: dict[tuple[int, str, int], str] = {}
        """By definitions, schema and depth: a schema may refer to itself, and more than once."""
        self._quote = quote = lark.mark(_QUOTE)
        self._plain = {
            "string": lark.rule(f"{quote} {lark.text_to(_QUOTE)}"),
            "integer": lark.rule(f"/{_INTEGER}/"),
            "number": lark.rule(f"/{_INTEGER}(\\.[0-9]{{1,17}})?/"),
            "boolean": lark.any_of(('"true"', '"false"')),
            "null": '"null"',
        }
        lark.define("bare", " | ".join([*self._plain.values(), "bare_list", "bare_object"]))
        lark.define("bare_list", self._list("bare"))
        pair = f'{_ANY_KEY} ":" bare'
        lark.define("bare_object", f'"{{" ({pair} ("," {pair})*)? "}}"')

    def object_of(self, tool: Tool, depth: int) -> str:
        """Write the arguments of a tool, or an object with such a schema."""
        properties, needed = tool.properties, _needed(tool)
        if properties is None:
            return "bare_object"
        pairs = [
            (
                f"{self._lark.literal(name + ':')} {self._value(tool, name, schema, depth)}",
                name in needed,
            )
            for name, schema in properties.items()
        ]
        return f'"{{" {_divided(self._lark, pairs)} "}}"'

    def _value(self, tool: Tool, name: str, schema: object, depth: int) -> str:
        key = (id(tool.parameters.get("$defs") or None), json.dumps(schema), depth)
        if key not in self._written:
            self._written[key] = self._new_value(tool, name, schema, depth)
        return self._written[key]

    def _new_value(self, tool: Tool, name: str, schema: object, depth: int) -> str:
        if texts := _texts(schema, tool):
            written = (self._lark.literal(text) for text in texts)
            return self._lark.any_of(f"{self._quote} {text} {self._quote}" for text in written)
        inside = merged(schema, tool.parameters) if depth else {}
        known = []
        for kind in sorted(tool.types_of(name)):
            if kind == "object":
                known.append(self.object_of(_part(inside, tool), depth - 1))
            elif kind == "array" and "items" in inside:
                item = _part({"properties": {"": inside["items"]}}, tool)
                known.append(self._list(self._value(item, "", inside["items"], depth - 1)))
            elif kind == "array":
                known.append("bare_list")
            elif kind in self._plain:
                known.append(self._plain[kind])
        return self._lark.any_of(known) if known else "bare"

    def _list(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'


def _divided(lark: Lark, parts: Sequence[tuple[str, bool]]) -> str:
    """Write parts with commas between them, of which those that are not needed may be left out."""
    first = more = '""'  # of what follows: as the first that is written, or behind others
    for part, is_needed in reversed(parts):
        here, behind = f"{part} {more}", f'"," {part} {more}'
        first = lark.rule(here if is_needed else f"{here} | {first}")
        more = lark.rule(behind if is_needed else f"{behind} | {more}")
    return first


WRITERS: Final[Mapping[str, Callable[[CallForm], str]]] = {
    "qwen-xml": partial(_xml, QWEN, "\n"),
    "minimax": partial(_xml, MINIMAX, ""),
    "seed": partial(_xml, SEED, ""),
    "glm": glm,
    "hy": partial(glm, in_section=True),
    "deepseek-dsml": dsml,
    "gemma": gemma,
    "lfm2": lfm2,
    "olmo": olmo,
}
"""By the names of formats."""
