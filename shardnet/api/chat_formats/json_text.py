"""Arguments as JSON text: followed as a model writes it, or made of bare values by a tool's schema.

Knows JSON, and JSON schemas as far as they say a value's type. Must not know formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from shardnet.api.chat_formats.marks import SURROGATES
from shardnet.errors import UsageError
from shardnet.json_references import MOST_LOOKED_AT, listed, merged, own_definitions, types_of

MAX_DEPTH: Final = 64

_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_IS_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGINS = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_MOST_SCALAR = 1024

Schema = Mapping[str, Any]

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_SCALARS = {"boolean": ("true", "false"), "null": ("null",)}


def as_json(value: object, *, allow_nan: bool = True) -> str:
    """Write a value as JSON. Half a pair of surrogates stays an escape: it is no character."""
    return escape_halves(json.dumps(value, ensure_ascii=False, allow_nan=allow_nan))


def escape_halves(text: str) -> str:
    """Write halves of pairs of surrogates, in the strings of JSON text, as escapes."""
    return SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def in_string(text: str) -> str:
    """Write text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonFollower:
    """One JSON value that comes in parts, passed on as far as it is valid.

    Characters that JSON forbids inside strings, as models write them, are escaped.
    `plain` writes marks in strings as their text; anywhere else they are no JSON.
    """

    def __init__(self, plain: Callable[[str], str]) -> None:
        self._plain = plain
        self._open: list[str] = []
        """The brackets that are open."""
        self._next = "value"
        """value, first value (or the end of a list), first key, key, colon, comma, string."""
        self._is_key = False
        self._scalar = ""
        self._escape = ""
        self.is_done = False
        """Whether the value is whole. A number at the top ends only with what follows it."""
        self.has_failed = False
        """Whether something came that is no JSON; `feed` has stopped before it."""

    def feed(self, text: str, start: int = 0) -> tuple[str, int]:
        """Take text from `start` on; return it as valid JSON, and where it stopped being taken."""
        parts: list[str] = []
        place = start
        while place < len(text) and not self.is_done and not self.has_failed:
            place = (
                self._string(text, place, parts)
                if self._in_string
                else self._between(text, place, parts)
            )
        return "".join(parts), place

    def finish(self) -> str:
        """Take the end of the text; return the rest of a number at the top."""
        return self._end_scalar() if self._scalar and not self._open else ""

    @property
    def n_unsettled(self) -> int:
        """How many characters were taken and not yet returned."""
        return len(self._scalar) + len(self._escape)

    @property
    def _in_string(self) -> bool:
        return self._next == "string"

    def _string(self, text: str, place: int, parts: list[str]) -> int:
        if self._escape:
            return self._escaped(text, place, parts)
        if plain := _PLAIN.match(text, place):
            parts.append(plain[0])
            return plain.end()
        char = text[place]
        if char == "\\":
            self._escape = char
        elif char == '"':
            parts.append(char)
            self._value_ended()
        else:  # a control character or a mark
            parts.append(in_string(self._plain(char)))
        return place + 1

    def _escaped(self, text: str, place: int, parts: list[str]) -> int:
        self._escape += text[place]
        if _ESCAPE.fullmatch(self._escape):
            parts.append(self._escape)
            self._escape = ""
        elif not _ESCAPE_BEGINS.fullmatch(self._escape):
            self._escape, self.has_failed = self._escape[:-1], True
            return place
        return place + 1

    def _between(self, text: str, place: int, parts: list[str]) -> int:
        """Take what stands outside of strings."""
        if scalar := _SCALAR.match(text, place):
            if self._next not in ("value", "first value"):
                self.has_failed = True
                return place
            self._scalar += scalar[0]
            self.has_failed = len(self._scalar) > _MOST_SCALAR
            return scalar.end()
        if self._scalar:
            parts.append(self._end_scalar())
            return place
        if space := _SPACE.match(text, place):
            parts.append(space[0])
            return space.end()
        if not self._take(text[place]):
            self.has_failed = True
            return place
        parts.append(text[place])
        return place + 1

    def _end_scalar(self) -> str:
        scalar, self._scalar = self._scalar, ""
        if not _IS_SCALAR.fullmatch(scalar):
            self._scalar, self.has_failed = scalar, True
            return ""
        self._value_ended()
        return scalar

    def _take(self, char: str) -> bool:
        """Take a character that opens, closes or divides; say whether it may stand here."""
        match char, self._next:
            case '"', "value" | "first value" | "key" | "first key":
                self._is_key = "key" in self._next
                self._next = "string"
            case (("{" | "["), ("value" | "first value")) if len(self._open) < MAX_DEPTH:
                self._open.append(char)
                self._next = "first key" if char == "{" else "first value"
            case "}", "first key" | "comma" if self._open[-1:] == ["{"]:
                self._close()
            case "]", "first value" | "comma" if self._open[-1:] == ["["]:
                self._close()
            case ":", "colon":
                self._next = "value"
            case ",", "comma":
                self._next = "key" if self._open[-1] == "{" else "value"
            case _:
                return False
        return True

    def _close(self) -> None:
        self._open.pop()
        self._is_key = False
        self._value_ended()

    def _value_ended(self) -> None:
        self._next = "colon" if self._is_key else "comma"
        self._is_key = False
        self.is_done = not self._open


@dataclass(frozen=True)
class Tool:
    """A tool that was offered: its name, and the JSON schema of its arguments as it was given.

    With `is_own` that has definitions of its own.
    """

    name: str
    given: Schema
    is_own: bool = False

    @cached_property
    def parameters(self) -> Schema:
        """The schema with definitions of its own, or as it is if it is too deep."""
        try:
            return self.given if self.is_own else own_definitions(self.given, is_strict=False)
        except UsageError:
            return self.given

    @cached_property
    def whole(self) -> Schema:
        """The schema with what all its parts say of the arguments."""
        return merged(self.parameters, self.parameters)

    @property
    def properties(self) -> Schema | None:
        """The schemas of the arguments by name, None if any may be given."""
        return self.whole.get("properties")

    def types_of(self, argument: str) -> frozenset[str]:
        """Return the types that an argument may have, none if the schema does not say."""
        return types_of({"anyOf": self._schemas_of(argument)}, self.parameters)

    def _schemas_of(self, argument: str) -> list[Any]:
        """Return the schemas of which a value of the argument has one."""
        named: list[Any] = []
        other: list[Any] = []
        waiting: list[Any] = [self.parameters]
        seen = set[int]()
        while waiting and len(seen) < MOST_LOOKED_AT:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            whole = self.whole if one is self.parameters else merged(one, self.parameters)
            if argument in whole.get("properties", ()):
                named.append(whole["properties"][argument])
                continue
            other.append(whole.get("additionalProperties"))
            waiting += [*listed(whole, "anyOf"), *listed(whole, "oneOf")]
        return named or other


def read_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """Read tools as OpenAI's API has them, by name; what has no name is left out."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = Tool(name, parameters if isinstance(parameters, Mapping) else {})
    return found


def is_only_text(types: frozenset[str]) -> bool:
    """Say whether a value of these types is text whatever it reads like."""
    return types == {"string"}


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON text that a bare value means.

    It is what its text reads like, as far as the schema allows that; otherwise a string. Without a
    schema it is a string unless it is an object, a list, a number, true, false or null.
    """
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    allowed = types or frozenset({"object", "array", "number", "boolean", "null"})
    for kind, words in _SCALARS.items():
        if kind in allowed and bare in words:
            return bare
    if _NUMBER.fullmatch(bare) and (
        "number" in allowed
        or ("integer" in allowed and ("string" not in allowed or float(bare).is_integer()))
    ):
        return bare
    if bare[:1] in ("{", "[") and allowed & {"object", "array"}:
        kind = "object" if bare[0] == "{" else "array"
        if kind in allowed and (read := _read_json(bare)):
            return read
    return json.dumps(text, ensure_ascii=False)


def _read_json(text: str) -> str:
    """Return an object or a list as strict JSON, "" if it is none."""
    try:
        return as_json(json.loads(text, strict=False), allow_nan=False)
    except (ValueError, RecursionError):
        return ""


class ObjectWriter:
    """Writes arguments that come one by one as the text of a JSON object.

    What can only be a string is written as it comes, anything else when it is whole.
    """

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._lead = "{"
        self._types: frozenset[str] = frozenset()
        self._parts: list[str] | None = None

    def begin(self, key: str, types: frozenset[str]) -> None:
        """Begin an argument of one of these types, unknown if there are none."""
        head = f"{self._lead}{json.dumps(key, ensure_ascii=False)}: "
        self._lead, self._types = ", ", types
        if is_only_text(types):
            self._parts = None
            self._sink(head + '"')
        else:
            self._parts = [head]

    def push(self, text: str) -> None:
        """Add to the argument's value."""
        if self._parts is None:
            self._sink(in_string(text))
        else:
            self._parts.append(text)

    def end_value(self) -> None:
        """End the argument."""
        if self._parts is None:
            self._sink('"')
        else:
            head, *parts = self._parts
            self._sink(head + json_of("".join(parts), self._types))

    def put(self, key: str, text: str) -> None:
        """Write an argument whose value is JSON text."""
        self._sink(f"{self._lead}{json.dumps(key, ensure_ascii=False)}: {text}")
        self._lead = ", "

    def end(self) -> None:
        """End the object."""
        self._sink("{}" if self._lead == "{" else "}")
