"""How docs/protocol.md writes msgpack schemas: the same text made from the structs."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as mi

from shardnet import slot_operations, stage_form, types
from shardnet.stage_form import StageOptions
from shardnet.wire.framing import schema
from shardnet.wire.messages import (
    activity,
    bulk,
    chat,
    control,
    deputies,
    diagnostics,
    drafting,
    extras,
    generation,
    handshake,
    household,
    measurements,
    membership,
    plans,
    stages,
    updates,
)

_INTEGERS = {
    (0, 2**32 - 1): "u32",
    (0, 2**63 - 1): "u63",
    (0, None): "u64",
    (0, 255): "u8",
}

_HEX = {r"\A[0-9a-f]{64}\Z": "hex(64)", r"\A(?:[0-9a-f]{64})?\Z": 'hex(64) or ""'}


def fields_of(kind: type[Any]) -> str:
    """Write a struct's fields in order: `name: type`, with `= default` where there is one.

    A field that may be left out is `name?`.
    """
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return ", ".join(f"{_key(f)}: {_type(f.type)}{_default(f)}" for f in info.fields)


def _key(field: mi.Field) -> str:
    has_default = field.default, field.default_factory
    may_be_left_out = not field.required and has_default == (msgspec.NODEFAULT,) * 2
    return f"{field.encode_name}?" if may_be_left_out else field.encode_name


def _default(field: mi.Field) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f" = {_value(field.default)}"
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {_value(field.default_factory())}"
    return ""


def _value(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _number(value: float | None) -> str:
    if value is None:
        return "-inf"
    whole = abs(value) < 1e15 and value == int(value)
    return f"{value:.0f}" if whole else f"{value:g}"


def _type(info: mi.Type) -> str:
    match info:
        case mi.Metadata(type=inner):
            return _type(inner)
        case mi.IntType(ge=low, lt=below) if below is not None:
            return f"{low}..{below - 1}"
        case mi.IntType(ge=low, le=high):
            return _INTEGERS.get((low, high)) or f"{low}..{high}"
        case mi.FloatType(ge=low, le=high):
            return f"float {_number(low)}..{_number(high)}"
        case mi.BoolType():
            return "bool"
        case mi.NoneType():
            return "null"
        case mi.StrType(pattern=pattern) if pattern in _HEX:
            return _HEX[pattern]
        case mi.StrType(max_length=longest):
            return f"text({longest})"
        case mi.BytesType(max_length=longest):
            return f"bytes({longest})"
        case mi.LiteralType(values=values):
            return " or ".join(_value(value) for value in values)
        case mi.EnumType(cls=cls):
            return " or ".join(_value(member) for member in cls)
        case (
            mi.ListType(item_type=item, max_length=longest)
            | mi.VarTupleType(item_type=item, max_length=longest)
        ):
            return f"[{_type(item)}]({longest})"
        case mi.TupleType(item_types=items):
            return f"[{', '.join(map(_type, items))}]"
        case mi.UnionType(types=types):
            return " or ".join(map(_type, types))
        case mi.StructType(cls=cls):
            return cls.__name__
    raise NotImplementedError(f"no notation for {info}")


CONTROL_MESSAGES = (
    control,
    membership,
    measurements,
    diagnostics,
    stages,
    updates,
    household,
    plans,
    activity,
    chat,
    generation,
    deputies,
    drafting,
)
STRUCTS = {
    name: kind
    for module in (handshake, slot_operations, stage_form, extras, *CONTROL_MESSAGES, bulk)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    if name not in {*vars(types), *vars(schema), StageOptions.__name__}
}


if __name__ == "__main__":  # what tests/golden/release_messages.txt has of a release
    for name, kind in sorted(STRUCTS.items()):
        print(f"{name} | {fields_of(kind)}")
