"""The extreme values of every field of a message, made from its schema.

A value is what msgpack holds: maps, lists, numbers, text. Knows nothing of any particular message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as mi

WRONG = "wrong", -(2**63), [[]], {"x": 1}, b"\xff", None, True, 2**64 - 1, 0.5
"""Values of which most types take none or few."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """A message in which one field, at `path`, has an extreme value, within its bounds or not."""

    path: str
    meta: dict[str, Any] | list[Any]
    is_within: bool


def extremes(kind: type[Any], base: dict[str, Any] | None = None) -> Iterator[Extreme]:
    """Yield messages of a struct type, each with one extreme field.

    The others are those of `base`, where it has them, else plain.
    """
    for path, value, is_within in _extremes(mi.type_info(kind), kind.__name__, base):
        if isinstance(value, dict | list):
            yield Extreme(path, value, is_within)


def plain(kind: type[Any]) -> Any:
    """Return a small message of a struct type, within its bounds."""
    return _plain(mi.type_info(kind))


def unbounded(kind: Any) -> list[str]:
    """List the fields of a type, and of all inside it, that have no bound."""
    return [path for path, info in leaves(kind) if not _is_bounded(path, info)]


def leaves(kind: Any) -> Iterator[tuple[str, mi.Type]]:
    """Yield every type inside `kind` that is no struct and no union, with the path of its field."""
    yield from _leaves(mi.type_info(kind), "", frozenset())


def structs(kind: Any) -> set[type[Any]]:
    """Return the structs that a message of type `kind` may hold."""
    found: set[type[Any]] = set()
    waiting = [mi.type_info(kind)]
    while waiting:
        info = waiting.pop()
        if isinstance(info, mi.StructType):
            if info.cls not in found:
                found.add(info.cls)
                waiting += [field.type for field in info.fields]
        else:
            waiting += _parts(info)
    return found


def _parts(info: mi.Type) -> list[mi.Type]:
    match info:
        case mi.Metadata(type=inner):
            return [inner]
        case mi.UnionType(types=types):
            return list(types)
        case mi.ListType(item_type=item) | mi.VarTupleType(item_type=item):
            return [item]
        case mi.TupleType(item_types=items):
            return list(items)
        case _:
            return []


def _leaves(info: mi.Type, path: str, above: frozenset[type[Any]]) -> Iterator[tuple[str, mi.Type]]:
    if isinstance(info, mi.StructType):
        assert info.cls not in above, f"{path} holds itself"
        for field in info.fields:
            inside = f"{info.cls.__name__}.{field.name}"
            yield from _leaves(field.type, inside, above | {info.cls})
        return
    if not isinstance(info, mi.Metadata | mi.UnionType):
        yield path, info
    for part in _parts(info):
        yield from _leaves(part, path, above)


_WHOLE_64_BITS = {"sequence_id", "sequence", "seed"}
"""Numbers of 64 bits, all of which have a meaning."""


def _is_bounded(path: str, info: mi.Type) -> bool:
    match info:
        case mi.IntType(ge=low, le=high, lt=below):
            has_top = high is not None or below is not None
            return low is not None and (has_top or path.partition(".")[2] in _WHOLE_64_BITS)
        case mi.FloatType(ge=low, le=high):
            is_logprob = path.endswith((".logprob", ".top"))  # minus infinity is one
            return high is not None and (low is not None or is_logprob)
        case mi.StrType(max_length=longest) | mi.BytesType(max_length=longest):
            return longest is not None
        case mi.ListType(max_length=longest) | mi.VarTupleType(max_length=longest):
            return longest is not None
        case mi.TupleType() | mi.BoolType() | mi.NoneType() | mi.LiteralType() | mi.EnumType():
            return True
        case _:
            return isinstance(info, type(mi.type_info(msgspec.UnsetType)))


def _plain(info: mi.Type) -> Any:
    match info:
        case mi.Metadata(type=inner):
            return _plain(inner)
        case mi.BoolType():
            return False
        case mi.IntType(ge=low, le=high):
            return low or (0 if high == 0 else 1)
        case mi.FloatType(ge=low, le=high):
            return float(low or min(1.0, 0.0 if high is None else high))
        case mi.StrType(pattern=pattern):
            return next(text for text in ("name", "a" * 64) if re.search(pattern or "", text))
        case mi.BytesType(min_length=shortest):
            return b"bytes".ljust(shortest or 0)
        case mi.LiteralType(values=values):
            return values[0]
        case mi.EnumType(cls=cls):
            return next(iter(cls)).value
        case mi.ListType() | mi.VarTupleType():
            return []
        case mi.TupleType(item_types=items):
            return [_plain(item) for item in items]
        case mi.UnionType(types=types):
            return _plain(next(t for t in types if not isinstance(t, mi.NoneType)))
        case mi.StructType(array_like=True, fields=fields):
            return [_plain(field.type) for field in fields]
        case mi.StructType(fields=fields):
            required = {f.encode_name: _plain(f.type) for f in fields if f.required}
            return _tag(info) | required
    raise NotImplementedError(f"no value for {info}")


def _tag(info: mi.StructType) -> dict[str, Any]:
    return {info.tag_field: info.tag} if info.tag_field is not None else {}


def _extremes(info: mi.Type, path: str, base: Any = None) -> Iterator[tuple[str, Any, bool]]:
    """Yield (path, value, whether it is within the bounds)."""
    match info:
        case mi.Metadata(type=inner):
            yield from _extremes(inner, path, base)
        case mi.UnionType(types=types):
            for part in types:
                for at, value, is_within in _extremes(part, path, base):
                    if is_within or not any(_takes(other, value) for other in types):
                        yield at, value, is_within
        case mi.StructType(array_like=True, fields=fields):
            row = _plain(info)
            for place, field in enumerate(fields):
                for at, value, is_within in _extremes(field.type, f"{path}.{field.name}"):
                    yield at, [*row[:place], value, *row[place + 1 :]], is_within
            yield path, [*row, 0], False
            yield path, row[:-1], False
        case mi.StructType(fields=fields):
            message = _plain(info) | (base or {})
            for field in fields:
                name = field.encode_name
                inside = f"{path}.{name}"
                for at, value, is_within in _extremes(field.type, inside, message.get(name)):
                    yield at, message | {name: value}, is_within
                if field.required:
                    yield f"{path}.{name}", {k: v for k, v in message.items() if k != name}, False
            yield path, message | {"unknown": 1}, not info.forbid_unknown_fields
        case mi.TupleType(item_types=items):
            row = list(base or _plain(info))
            for place, item in enumerate(items):
                for at, value, is_within in _extremes(item, f"{path}[{place}]"):
                    yield at, [*row[:place], value, *row[place + 1 :]], is_within
            yield path, [*row, 0], False
            yield path, [], False
        case (
            mi.ListType(item_type=item, max_length=int(longest))
            | mi.VarTupleType(item_type=item, max_length=int(longest))
        ):
            for at, value, is_within in _extremes(item, f"{path}[]"):
                yield at, [value], is_within
            yield path, [], True
            yield path, [_plain(item)] * longest, True
            yield path, [_plain(item)] * (longest + 1), False
        case _:
            yield from ((path, value, True) for value in _within(info))
            yield from ((path, value, False) for value in _outside(info))


def _within(info: mi.Type) -> list[Any]:
    match info:
        case mi.BoolType():
            return [False, True]
        case mi.IntType(ge=int(low), le=high, lt=below):
            top = high if high is not None else 2**64 - 1 if below is None else below - 1
            return [low, top]
        case mi.FloatType(ge=low, le=float(high) | int(high)):
            return [-math.inf if low is None else float(low), float(high), low or 0.0]
        case mi.StrType(max_length=int(longest), min_length=shortest, pattern=pattern):
            texts = ["", "x", "x" * longest, "é" * longest, "a" * 64, ".."]
            fitting = [t for t in texts if re.search(pattern or "", t)]
            return [t for t in fitting if (shortest or 0) <= len(t) <= longest]
        case mi.BytesType(max_length=int(longest), min_length=shortest):
            return [bytes(shortest or 0), bytes(longest)]
        case mi.LiteralType(values=values):
            return list(values)
        case mi.EnumType(cls=cls):
            return [member.value for member in cls]
        case _:
            return [None] if isinstance(info, mi.NoneType) else []


def _outside(info: mi.Type) -> list[Any]:
    candidates: list[Any] = [*WRONG, math.nan, math.inf, -math.inf, 1e300, -1e300]
    match info:
        case mi.IntType(ge=int(low), le=high, lt=below):
            candidates += [low - 1] if low > -(2**63) else []
            top = high if high is not None else None if below is None else below - 1
            candidates += [] if top is None else [top + 1]
        case mi.FloatType(ge=low, le=float(high) | int(high)):
            candidates += [math.nextafter(high, math.inf)]
            candidates += [] if low is None else [math.nextafter(low, -math.inf)]
        case mi.StrType(max_length=int(longest)):
            candidates += ["x" * (longest + 1), "a\0b", "../../x", "A" * 64, "a" * 63]
        case mi.BytesType(max_length=int(longest)):
            candidates += [b"", bytes(longest + 1)]
    return [value for value in candidates if not _takes(info, value)]


def _takes(info: mi.Type, value: Any) -> bool:
    """Say whether a type takes a value, by its description alone."""
    match info:
        case mi.Metadata(type=inner):
            return _takes(inner, value)
        case mi.NoneType():
            return value is None
        case mi.BoolType():
            return isinstance(value, bool)
        case mi.IntType(ge=low, le=high, lt=below):
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return (
                is_whole
                and (low is None or value >= low)
                and (high is None or value <= high)
                and (below is None or value < below)
            )
        case mi.FloatType(ge=low, le=high):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return (
                is_number
                and not math.isnan(value)
                and (low is None or value >= low)
                and (high is None or value <= high)
            )
        case mi.StrType(max_length=longest, min_length=shortest, pattern=pattern):
            return (
                isinstance(value, str)
                and (shortest or 0) <= len(value)
                and (longest is None or len(value) <= longest)
                and re.search(pattern or "", value) is not None
            )
        case mi.BytesType(max_length=longest, min_length=shortest):
            return (
                isinstance(value, bytes)
                and (shortest or 0) <= len(value)
                and (longest is None or len(value) <= longest)
            )
        case mi.LiteralType(values=values):
            return any(value == known and type(value) is type(known) for known in values)
        case mi.EnumType(cls=cls):
            return value in [member.value for member in cls]
        case mi.ListType() | mi.VarTupleType():
            return value == []
        case mi.StructType(array_like=False, forbid_unknown_fields=False, fields=fields):
            return isinstance(value, dict) and not any(field.required for field in fields)
        case _:
            return False
