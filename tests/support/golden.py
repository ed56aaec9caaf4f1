"""Golden files: what people and programs read of shardnet, kept in tests/golden.

    WRITE_GOLDEN=1 python -m pytest tests/test_golden.py tests/test_growth.py

writes them anew; the difference then shows what a change does to those who read it.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from msgspec import inspect as mi

FOLDER = Path(__file__).parents[1] / "golden"
ANEW = "WRITE_GOLDEN=1 python -m pytest tests/test_golden.py tests/test_growth.py"
PLAIN = {
    mi.BoolType: "bool",
    mi.IntType: "int",
    mi.FloatType: "float",
    mi.StrType: "str",
    mi.NoneType: "null",
    mi.AnyType: "any",
    mi.RawType: "any",
    mi.EnumType: "str",
}


def check_golden(name: str, text: str) -> None:
    """Fail where `text` is not what the golden file says; write the file if that is wanted."""
    path = FOLDER / name
    if "WRITE_GOLDEN" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"if that is meant, run {ANEW}"


def check_shrinking(name: str, found: set[str]) -> None:
    """Fail for what is not in the golden list of exceptions, and for an exception that is gone.

    The list is only ever written anew without what is gone: what is new is added by hand.
    """
    path = FOLDER / name
    listed = path.read_text(encoding="utf-8").splitlines()
    assert sorted(found - {*listed}) == [], f"not in {name}, and see what it is a list of"
    if "WRITE_GOLDEN" in os.environ:
        listed = [line for line in listed if line in found]
        path.write_text("".join(f"{line}\n" for line in listed), encoding="utf-8")
    assert sorted({*listed} - found) == [], f"these are gone: run {ANEW}"


def check_counts(name: str, counts: dict[str, int]) -> None:
    """Fail for counts that the golden table does not allow; write it anew if that is wanted."""
    path = FOLDER / name
    if "WRITE_GOLDEN" in os.environ:
        written = "".join(f"{counts[key]:6} {key}\n" for key in sorted(counts))
        path.write_text(written, encoding="utf-8")
    rows = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    faults = miscounts({key: int(number) for number, key in rows}, counts)
    assert faults == [], (
        f"{faults}: make it shorter, or change the number in tests/golden/{name} in the same "
        f"commit, where reviewers see it ({ANEW} writes it)"
    )


def miscounts(allowed: dict[str, int], counts: dict[str, int]) -> list[str]:
    """Name what counts more than it may, or so little that the table is 1 % above it."""
    names = sorted(allowed.keys() | counts.keys())
    pairs = ((name, allowed.get(name, 0), counts.get(name, 0)) for name in names)
    return [
        f"{name}: {n}, the table says {most}"
        for name, most, n in pairs
        if not n <= most <= 1.01 * n
    ]


def filled(annotation: Any) -> Any:
    """Make a value of a msgspec type without any default in it, the same one every time.

    Texts are the names of their fields, and numbers are made of them, so that what stands in the
    wrong place is seen.
    """
    return _filled(mi.type_info(annotation), "")


def _filled(info: mi.Type, name: str) -> Any:
    number = zlib.crc32(name.encode()) % 1000 + 1
    match info:
        case mi.BoolType():
            return True
        case mi.IntType(le=high, lt=below):
            return min(number, *(bound for bound in (high, below and below - 1) if bound), 10**9)
        case mi.FloatType(le=high):
            return min(number / 8, high if high is not None else number)
        case mi.StrType():
            return name
        case mi.LiteralType(values=values):
            return values[-1]
        case mi.ListType(item_type=item) | mi.VarTupleType(item_type=item):
            made = [_filled(item, name)]
            return made if isinstance(info, mi.ListType) else tuple(made)
        case mi.TupleType(item_types=items):
            return tuple(_filled(item, f"{name} {place}") for place, item in enumerate(items))
        case mi.UnionType(types=types):
            return _filled(next(one for one in types if not isinstance(one, mi.NoneType)), name)
        case mi.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _filled(field.type, field.name) for field in fields})
        case mi.Metadata(type=inner):
            return _filled(inner, name)
    raise NotImplementedError(f"{name}: no value for {info}: add one")


def shape(annotation: Any) -> Any:
    """Describe the JSON of a msgspec type: its keys, and the types in place of values."""
    return _shape(mi.type_info(annotation))


def _shape(info: mi.Type) -> Any:
    match info:
        case mi.StructType(fields=fields) | mi.DataclassType(fields=fields):
            return {field.encode_name: _shape(field.type) for field in fields}
        case mi.ListType(item_type=item) | mi.VarTupleType(item_type=item):
            return [_shape(item)]
        case mi.TupleType(item_types=items):
            return [_shape(item) for item in items]
        case mi.DictType(value_type=value):
            return {"*": _shape(value)}
        case mi.LiteralType(values=values):
            return "|".join(map(str, values))
        case mi.Metadata(type=inner):
            return _shape(inner)
        case mi.UnionType(types=types):
            return _either([_shape(one) for one in types])
    return PLAIN[type(info)]


def _either(shapes: list[Any]) -> Any:
    """Join the shapes of a union, null last: names to one, others to a list of them."""
    if all(isinstance(one, str) for one in shapes):
        return "|".join(sorted(shapes, key=lambda one: (one == "null", one)))
    return {"either": shapes}
