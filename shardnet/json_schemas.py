"""What is made of a JSON schema before output is kept to it: objects closed, keywords left out.

Pure. Knows where schemas stand within each other, which objects of theirs are open, and which
keywords no grammar keeps. Must not know grammars: the compiler refuses what is left and wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_SAME_OBJECT: Final = ("anyOf", "oneOf", "allOf", "then", "else", "dependentSchemas")
"""Keywords whose schemas are of the object that theirs is of."""
_ONE: Final = frozenset(
    (
        "items",
        "additionalItems",
        "additionalProperties",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
    )
)
_LISTED: Final = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))
_DEFINING: Final = ("$defs", "definitions")
_NAMED: Final = frozenset(("properties", "patternProperties", "dependentSchemas", *_DEFINING))
_NARROWING: Final = frozenset(
    (
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "then",
        "else",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords that no grammar keeps, and without which a schema allows more, never less."""
KEPT_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

_MOST_ROUNDS: Final = 8
"""Of looking for definitions that are parts of others: what refers further stays as it is."""

Part = Callable[[str, str, Any], Any]


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with objects that have only the properties it names.

    Left open are objects that say so by `additionalProperties` or `unevaluatedProperties`, those
    without `properties`, and those of which several schemas each name a part. Raises
    RecursionError for one that is nested too deeply.
    """
    shared: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        n_shared = len(shared)
        closed: dict[str, Any] = _close(schema, "#", False, shared)
        if len(shared) == n_shared:
            return closed
    return dict(schema)


def relax(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the schema without what only narrows it and no grammar keeps, and names of that.

    Raises RecursionError for one that is nested too deeply.
    """
    left_out: dict[str, None] = {}

    def part(keyword: str, name: str, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        kept = {}
        for key, value in schema.items():
            if key in _NARROWING:
                left_out[key] = None
            elif key == "format" and isinstance(value, str) and value not in KEPT_FORMATS:
                left_out[f"format {value[:40]}"] = None
            else:
                kept[key] = value
        return _with_parts(kept, part)

    relaxed: dict[str, Any] = part("", "", schema)
    return relaxed, tuple(left_out)


def _close(schema: Any, place: str, is_part: bool, shared: set[str]) -> Any:
    """Close the objects of a schema; of itself not, if it `is_part` of what others describe too.

    `place` is how others refer to it, "" for no way; those that are parts are put into `shared`.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_part = is_part or place in shared or _n_parts(schema) > 1
    if is_part and isinstance(reference := schema.get("$ref"), str):
        shared.add(reference)

    def part(keyword: str, name: str, inner: Any) -> Any:
        below = f"#/{keyword}/{name}" if place == "#" and keyword in _DEFINING else ""
        return _close(inner, below, is_part and keyword in _SAME_OBJECT, shared)

    closed = _with_parts(schema, part)
    if not is_part and _is_open(schema):
        closed["additionalProperties"] = False
    return closed


def _n_parts(schema: Mapping[str, Any]) -> int:
    """Count the schemas that describe this one's object beside each other."""
    alternatives = sum(key in schema for key in ("properties", "$ref", "anyOf", "oneOf", "then"))
    every = schema.get("allOf")
    return alternatives + (len(every) if isinstance(every, list) else 0)


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Say whether a schema names properties, and leaves others open without saying so."""
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or "additionalProperties" in schema:
        return False
    if isinstance(needed, list) and not all(name in properties for name in needed):
        return False
    return not schema.get("unevaluatedProperties") and "patternProperties" not in schema


def _with_parts(schema: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return a schema with each schema inside it, its keyword and its name given to `part`."""
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, Mapping):
            made[keyword] = {name: part(keyword, name, inner) for name, inner in value.items()}
        elif keyword in _LISTED and isinstance(value, list):
            made[keyword] = [part(keyword, "", inner) for inner in value]
        elif keyword in _ONE and isinstance(value, Mapping):
            made[keyword] = part(keyword, "", value)
    return made
