"""Hypothesis strategies for msgspec types, made from their own descriptions."""

from __future__ import annotations

import enum
import re
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect as mi


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a msgspec type, within its bounds."""
    return _values(mi.type_info(annotation))


def _values(info: mi.Type) -> st.SearchStrategy[Any]:
    match info:
        case mi.BoolType():
            return st.booleans()
        case mi.IntType(ge=low, le=high, lt=below):
            top = high if high is not None else 2**64 - 1 if below is None else below - 1
            return st.integers(low, top)
        case mi.FloatType(ge=low, le=high):
            return st.floats(low, high, allow_nan=False)
        case mi.StrType(pattern=str(pattern)) if "{64}" in pattern:
            return st.from_regex(pattern, alphabet=st.characters(codec="ascii"))
        case mi.StrType(max_length=int(longest), min_length=shortest, pattern=str(pattern)):
            letters = st.characters(codec="utf-8", exclude_categories=["Cc"])
            return st.text(letters, min_size=shortest or 0, max_size=min(longest, 20)).filter(
                lambda text: re.search(pattern, text) is not None
            )
        case mi.StrType(max_length=int(longest)):
            return st.text(st.characters(codec="utf-8"), max_size=min(longest, 20))
        case mi.BytesType(max_length=int(longest), min_length=shortest):
            return st.binary(min_size=shortest or 0, max_size=min(longest, 20))
        case mi.LiteralType(values=literals):
            return st.sampled_from(literals)
        case mi.NoneType():
            return st.none()
        case mi.EnumType(cls=cls):
            return st.sampled_from(list(_members(cls)))
        case mi.ListType(item_type=item, max_length=int(longest)):
            return st.lists(_values(item), max_size=min(longest, 3))
        case mi.VarTupleType(item_type=item, max_length=int(longest)):
            return st.lists(_values(item), max_size=min(longest, 3)).map(tuple)
        case mi.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case mi.UnionType(types=types):
            return st.one_of([_values(t) for t in types])
        case mi.StructType(cls=cls, fields=fields, array_like=True):
            return st.tuples(*(_values(f.type) for f in fields)).map(lambda v, c=cls: c(*v))
        case mi.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: _values(f.type) for f in fields})
        case mi.Metadata(type=inner):
            return _values(inner)
    raise NotImplementedError(f"no strategy for {info}: bound it, or add one")


def _members(cls: type[Any]) -> list[enum.Enum]:
    return list(cls)
