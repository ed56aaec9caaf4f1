"""What is wrong with a value that a message or a line cannot hold: field, value, what would do.

Knows how msgspec words its refusals, which nobody should have to read. Must not know which values
are asked for, nor by whom.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import inspect

_SHOWN: Final = 60
"""Characters of a value that a message shows."""
_INTS: Final = range(-(2**63), 2**64)
"""The whole numbers that msgpack can write."""
_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
    }
)
_BOUNDS: Final[Mapping[str, str]] = MappingProxyType(
    {"<=": "of at most", ">=": "of at least", "<": "below", ">": "above"}
)
_EXPECTED: Final = re.compile(
    r"Expected `(?P<kind>[^`]+)`"
    r"(?P<length> of length(?: <=| >=)? \d+)?(?: (?P<bound><=|>=|<|>) (?P<limit>\S+))?"
)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")
_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def refused_words(error: msgspec.ValidationError, root: object) -> str:
    """Say what of `root`, a struct or what JSON gave, msgspec refused with `error`."""
    what, _, path = str(error).partition(" - at `$")
    path, hidden, _ = path.rstrip("`").partition("[...]")
    if unknown := _UNKNOWN.fullmatch(what):
        return f"{_inside(path, unknown['name'])} is not known here"
    if missing := _MISSING.fullmatch(what):
        return f"{_inside(path, missing['name'])} is missing"
    owner, value = _follow(root, path)
    name = path.lstrip(".") or "the value"
    told = f"{name} is {_shown(value)}" if _is_shown(value) else name
    if hidden:
        told = f"a value of {name}"
    wanted = _wanted(what, owner, path) or what
    return f"{told}: give {wanted}"


def unwritable_words(root: msgspec.Struct) -> str:
    """Say which value of `root` has no form in a message: a huge number, text with half a letter.

    "" where there is none.
    """
    for path, value in _leaves(root):
        if isinstance(value, int) and value not in _INTS:
            return f"{path} is {_shown(value)}: give a smaller number"
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                why = f"{error.reason} at character {error.start + 1}"
                return f"{path} is no text that UTF-8 has a form for ({why}): give text without it"
    return ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Say which name was perhaps meant, as the end of a sentence; "" where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _follow(root: object, path: str) -> tuple[object, object]:
    """Return what stands at `path` and what holds it, UNSET for what cannot be followed."""
    owner: object = msgspec.UNSET
    value: Any = root
    for key, index in _STEP.findall(path):
        owner = value
        try:
            if index:
                value = value[int(index)]
            elif isinstance(value, Mapping):
                value = value[key]
            else:
                value = getattr(value, key)
        except (LookupError, TypeError, AttributeError):
            return owner, msgspec.UNSET
    return owner, value


def _is_shown(value: object) -> bool:
    """Whether a value says more than its name: the whole of a structure does not."""
    return value is not msgspec.UNSET and not isinstance(value, msgspec.Struct)


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"text of {len(value)} characters"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > _SHOWN // 10:
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _wanted(what: str, owner: object, path: str) -> str:
    """Say what would do; "" where `what` is in words that nobody foresaw."""
    if what.startswith("Invalid enum value"):
        return " or ".join(_choices(owner, path.rpartition(".")[2]))
    found = _EXPECTED.match(what)
    if found is None:
        return ""
    kinds = [kind for kind in found["kind"].split(" | ") if kind != "null"]
    words = " or ".join(_KINDS.get(kind, kind) for kind in kinds)
    if found["length"]:
        unit = "characters" if "str" in kinds else "entries"
        *bound, limit = found["length"].removeprefix(" of length ").split()
        return f"{words} {_BOUNDS[bound[0]] if bound else 'of'} {limit} {unit}"
    if found["bound"]:
        return f"{words} {_BOUNDS[found['bound']]} {found['limit']}"
    return words


def _choices(owner: object, name: str) -> list[str]:
    """List the values that the field `name` of the struct `owner` may have."""
    if not isinstance(owner, msgspec.Struct):
        return []
    told = inspect.type_info(type(owner))
    assert isinstance(told, inspect.StructType)
    kinds = [field.type for field in told.fields if field.name == name]
    parts = [
        part
        for kind in kinds
        for part in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))
    ]
    named = [str(v) for p in parts if isinstance(p, inspect.LiteralType) for v in p.values if v]
    numbers = [_KINDS["int"] for part in parts if isinstance(part, inspect.IntType)]
    return [*named, *numbers]


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _leaves(getattr(value, name), _inside(path, name))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{index}]")
    else:
        yield path, value
