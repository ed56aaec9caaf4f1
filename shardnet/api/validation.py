"""Error texts for values that do not fit their msgspec type: field, value, what is accepted.

Walks a value beside the description of its type. Must not know any particular message.
"""

from __future__ import annotations

import difflib
import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import inspect as mi

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half a pair, or a half of a whole one: as an escape, or encoded by itself."""
_SHOWN: Final = 60
"""Most characters of a value that an error shows."""
_INTS: Final = range(-(2**63), 2**64)
"""The integers that msgpack can encode."""
_KINDS: Final[Mapping[type[mi.Type], str]] = MappingProxyType(
    {
        mi.IntType: "a whole number",
        mi.FloatType: "a number",
        mi.StrType: "text",
        mi.BoolType: "true or false",
        mi.BytesType: "bytes",
        mi.ListType: "a list",
        mi.VarTupleType: "a list",
        mi.TupleType: "a list",
        mi.DictType: "an object",
        mi.StructType: "an object",
    }
)


def find_refused(value: object, kind: Any) -> str:
    """Say why `value`, a struct or decoded JSON, is not of the msgspec type `kind`.

    Names the first wrong field, its value and what is accepted: "max_tokens is 'x': give a whole
    number". Returns "" where nothing is found.
    """
    return next(_refused(value, _type_info(kind), ""), "")


@functools.cache
def _type_info(kind: Any) -> mi.Type:
    """Return the description of a type, which takes 10 ms to make of a large message."""
    return mi.type_info(kind)


def find_unwritable(root: object) -> str:
    """Say which value of `root`, a struct or decoded JSON, msgpack cannot encode: a huge integer,
    text with half a surrogate pair.

    Returns "" where there is none.
    """
    for path, value in _leaves(root):
        if isinstance(value, int) and value not in _INTS:
            return f"{path} is {_shown(value)}: give a smaller number"
        if isinstance(value, str) and (why := _half_pair(value)):
            return f"{path or 'the text'} has {why}"
    return ""


def find_half_pair(text: bytes | str) -> str:
    """Say which text in JSON has half a surrogate pair: the parser only says that it is no JSON.

    Returns "" where none has, and for what is no JSON.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if not _SURROGATE.search(raw):
        return ""
    try:
        leaves = [(path, why) for path, one in _leaves(json.loads(raw)) if (why := _half_pair(one))]
    except (ValueError, RecursionError):
        return ""
    return f"{leaves[0][0] or 'the text'} has {leaves[0][1]}" if leaves else ""


def _half_pair(value: object) -> str:
    """Say where a text has half a surrogate pair; "" where it has none, and for other values."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        where = f"half a surrogate pair at character {error.start + 1}"
        return f"{where}, which is not valid Unicode: give the whole character"
    return ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'NAME'?` for the most similar known name; "" where none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _refused(value: object, info: mi.Type, path: str) -> Iterator[str]:
    """Yield what is wrong with `value` and with what is inside it."""
    kinds = _alternatives(info)
    fitting = next((part for part in kinds if _is_of(value, part)), None)
    if fitting is None:
        name = path or "the value"
        shown = name if isinstance(value, msgspec.Struct) else f"{name} is {_shown(value)}"
        yield f"{shown}: give {_accepted(kinds, value)}"
        return
    if isinstance(fitting, mi.StructType):
        yield from _refused_fields(value, fitting, path)
    elif isinstance(fitting, mi.DictType):
        yield from _refused_entries(value, fitting, path)
    elif isinstance(fitting, mi.ListType | mi.VarTupleType | mi.TupleType):
        assert isinstance(value, list | tuple)
        items = (
            fitting.item_types
            if isinstance(fitting, mi.TupleType)
            else (fitting.item_type,) * len(value)
        )
        for index, (entry, item) in enumerate(zip(value, items, strict=True)):
            yield from _refused(entry, item, f"{path}[{index}]")


def _refused_fields(value: object, info: mi.StructType, path: str) -> Iterator[str]:
    names = {field.encode_name: field for field in info.fields}
    if isinstance(value, msgspec.Struct):
        for field in info.fields:
            yield from _refused(getattr(value, field.name), field.type, _inside(path, field.name))
        return
    assert isinstance(value, Mapping)
    for name, entry in value.items():
        if name in names:
            yield from _refused(entry, names[name].type, _inside(path, name))
        elif info.forbid_unknown_fields:
            yield f"{_inside(path, name)} is not a known key{nearest(name, [*names])}"
    for name, field in names.items():
        if field.required and name not in value:
            yield f"{_inside(path, name)} is missing"


def _refused_entries(value: object, info: mi.DictType, path: str) -> Iterator[str]:
    """Check keys and values of an object; JSON writes keys that are numbers as text."""
    assert isinstance(value, Mapping)
    key_type = _bare(info.key_type)
    for key, entry in value.items():
        read = int(key) if isinstance(key_type, mi.IntType) and _is_integer(key) else key
        for _ in _refused(read, key_type, ""):
            yield f"a key of {path} is {_shown(key)}: give {_accepted([key_type], key)}"
        for why in _refused(entry, info.value_type, ""):
            yield f"a value of {path}: {why.partition(': ')[2]}"


def _is_integer(key: object) -> bool:
    return isinstance(key, str) and key.removeprefix("-").isdecimal()


def _is_of(value: object, info: mi.Type) -> bool:
    """Say whether `value` itself, apart from its contents, is of this type and within bounds."""
    match info:
        case mi.NoneType():
            return value is None
        case mi.BoolType():
            return isinstance(value, bool)
        case mi.IntType():
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return is_whole and not _broken_limit(info, value)
        case mi.FloatType():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and not _broken_limit(info, value)
        case mi.StrType():
            is_text = isinstance(value, str) and _is_long_enough(value, info)
            return is_text and _matches(value, info)
        case mi.BytesType():
            is_data = isinstance(value, bytes | bytearray | memoryview)
            return is_data and _is_long_enough(value, info)
        case mi.LiteralType():
            return value in info.values
        case mi.EnumType():
            return isinstance(value, info.cls) or value in [member.value for member in info.cls]
        case mi.ListType() | mi.VarTupleType():
            return isinstance(value, list | tuple) and _is_long_enough(value, info)
        case mi.TupleType():
            return isinstance(value, list | tuple) and len(value) == len(info.item_types)
        case mi.DictType():
            return isinstance(value, Mapping)
        case mi.StructType():
            return isinstance(value, Mapping | info.cls)
        case _:
            return True  # a kind that no message has: msgspec checks it


def _is_long_enough(value: Any, info: Any) -> bool:
    shortest, longest = info.min_length or 0, info.max_length
    return len(value) >= shortest and (longest is None or len(value) <= longest)


def _matches(value: Any, info: mi.StrType) -> bool:
    return info.pattern is None or re.search(info.pattern, value) is not None


def _alternatives(info: mi.Type) -> list[mi.Type]:
    """List the types of a union, or the one type."""
    bare = _bare(info)
    return [_bare(part) for part in bare.types] if isinstance(bare, mi.UnionType) else [bare]


def _bare(info: mi.Type) -> mi.Type:
    return _bare(info.type) if isinstance(info, mi.Metadata) else info


def _accepted(kinds: Sequence[mi.Type], value: object) -> str:
    """Describe the accepted values; null and values left out are not mentioned."""
    names: list[str] = []
    words: list[str] = []
    for info in kinds:
        if isinstance(info, mi.LiteralType):
            names += [str(name) for name in info.values if name]
        elif isinstance(info, mi.EnumType):
            names += [str(member.value) for member in info.cls]
        elif type(info) in _KINDS:
            words.append(f"{_KINDS[type(info)]}{_broken_limit(info, value)}")
    return " or ".join([*names, *words])


def _broken_limit(info: mi.Type, value: Any) -> str:
    """Describe the bound of a type that `value` breaks; "" where it breaks none."""
    if isinstance(info, mi.IntType | mi.FloatType) and isinstance(value, int | float):
        limits = (
            ("of at least", info.ge, operator.ge),
            ("of at most", info.le, operator.le),
            ("above", info.gt, operator.gt),
            ("below", info.lt, operator.lt),
        )
        broken = (
            f" {word} {limit}"
            for word, limit, holds in limits
            if limit is not None and not holds(value, limit)
        )
        return next(broken, "")
    if isinstance(info, mi.TupleType) and isinstance(value, list | tuple):
        return f" of {len(info.item_types)} entries"
    if isinstance(info, mi.StrType) and isinstance(value, str):
        if not _matches(value, info):
            return " without control characters"
        return f" of at most {info.max_length} characters" if value else " that is not empty"
    if isinstance(info, mi.ListType | mi.VarTupleType) and isinstance(value, list | tuple):
        if not value:
            return " that is not empty"
        return f" of at most {info.max_length} entries"
    return ""


def _inside(path: str, name: object) -> str:
    return f"{path}.{name}".lstrip(".")


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"text of {len(value)} characters"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > _SHOWN // 10:
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", ())
    if names:
        for name in names:
            yield from _leaves(getattr(value, name), _inside(path, name))
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield f"a key of {path or 'the body'}", name
            yield from _leaves(entry, _inside(path, name))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{index}]")
    else:
        yield path, value
