"""What is made of a JSON schema before output is kept to it: objects closed, keywords left out.

Pure. Knows which objects of schemas are open, and which keywords and numbers no grammar keeps. Must
not know grammars: the compiler refuses what is left and wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardnet.errors import UsageError
from shardnet.json_references import (
    DEFINING,
    definition,
    listed,
    own_definitions,
    types_of,
    with_parts,
)

_SAME_OBJECT: Final = ("anyOf", "oneOf", "allOf", "then", "else", "dependentSchemas")
"""Keywords whose schemas are of the object that theirs is of."""

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
        "$dynamicRef",
        "$recursiveRef",
    )
)
"""Keywords that no grammar keeps, and without which a schema allows more, never less."""

KEPT_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

_COUNTED: Final = ("Length", "Items", "Properties")
_LARGEST: Final = {
    **dict.fromkeys(("minimum", "maximum", "const", "enum"), 10**18 - 1),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (1 << 53) - 1),
    **dict.fromkeys((f"{m}{of}" for m in ("min", "max") for of in _COUNTED), 1 << 31),
    "multipleOf": (1 << 32) - 1,
}
"""The size of numbers up to which grammars keep to them, if a float64, as they read them, is exact:
they make bounds inclusive by adding 1, and count to bounds of up to 18 digits.
"""
_INT64_MOST: Final = (1 << 63) - 1

_MOST_ROUNDS: Final = 8
"""Of looking for definitions that are parts of others: what refers further stays as it is."""

_MOST_LOOKED_AT: Final = 32
"""Parts of an object, for the properties that they name."""


def for_grammars(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with definitions of its own, and as llguidance reads it right.

    Alternatives in `oneOf` that differ in type, which it does not see behind references, are in
    `anyOf`. Raises UsageError for a number that no grammar keeps and what `own_definitions`
    refuses, RecursionError for a schema that is nested too deeply.
    """
    whole = own_definitions(schema)

    def part(_keyword: str, _name: str, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        for keyword in schema:
            if not _keeps_numbers(schema, keyword):
                raise UsageError(
                    f"schema: no grammar keeps the number in {keyword} {schema[keyword]}"[:120],
                    remedy="leave it out, or give a smaller one that is exact as a float64",
                )
        if "oneOf" in schema and _differ_in_type(listed(schema, "oneOf"), whole):
            schema = _with_any_of(schema)
        return with_parts(schema, part)

    made: dict[str, Any] = part("", "", whole)
    return made


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema `for_grammars` with objects that have only the properties it names.

    Left open are objects that say so by `additionalProperties` or `unevaluatedProperties`, those
    without `properties`, and those of which several schemas each name a part. Raises what
    `for_grammars` raises.
    """
    schema = for_grammars(schema)
    shared: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        n_shared = len(shared)
        closed: dict[str, Any] = _close(schema, "#", False, shared, schema)
        if len(shared) == n_shared:
            return closed
    return dict(schema)


def relax(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the schema without what only narrows it and no grammar keeps, and names of that.

    It has definitions of its own; references that lead nowhere stay. Raises UsageError or
    RecursionError for one that is nested too deeply.
    """
    whole = own_definitions(schema, is_strict=False)
    left_out: dict[str, None] = {}

    def part(keyword: str, name: str, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NARROWING:
                left_out[key] = None
            elif key == "format" and isinstance(value, str) and value not in KEPT_FORMATS:
                left_out[f"format {value[:40]}"] = None
            elif not _keeps_numbers(schema, key):
                left_out[f"{key} {value}"[:60]] = None
            else:
                kept[key] = value
        if "oneOf" in kept and not _differ_in_type(listed(kept, "oneOf"), whole):
            left_out["oneOf"] = None
            kept = _with_any_of(kept)
        return with_parts(kept, part)

    relaxed: dict[str, Any] = part("", "", whole)
    return relaxed, tuple(left_out)


def _differ_in_type(alternatives: list[Any], root: Mapping[str, Any]) -> bool:
    """Say whether no value can be valid by two of these schemas, as far as their types say."""
    seen = set[str]()
    for one in alternatives:
        types = types_of(one, root)
        types |= {"integer"} if "number" in types else set()
        if not types or seen & types:
            return False
        seen |= types
    return True


def _with_any_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of whose alternatives in `oneOf` more than one may hold."""
    kept = {key: value for key, value in schema.items() if key != "oneOf"}
    also = {"anyOf": schema["oneOf"]}
    return {**kept, "allOf": [*listed(kept, "allOf"), also]} if "anyOf" in kept else kept | also


def _keeps_numbers(schema: Mapping[str, Any], keyword: str) -> bool:
    """Say whether a grammar keeps the numbers of a keyword; also the greatest of 64 bits."""
    if keyword == "maximum" and schema[keyword] == _INT64_MOST:
        return schema.get("type") == "integer"
    return keyword not in _LARGEST or _keeps(schema[keyword], _LARGEST[keyword])


def _keeps(value: Any, largest: int) -> bool:
    if isinstance(value, Mapping):
        return all(_keeps(inner, largest) for inner in value.values())
    if isinstance(value, list):
        return all(_keeps(inner, largest) for inner in value)
    return not isinstance(value, int | float) or (abs(value) <= largest and float(value) == value)


def _close(
    schema: Any, place: str, is_part: bool, shared: set[str], root: Mapping[str, Any]
) -> Any:
    """Close the objects of a schema; of itself not, if it `is_part` of what others describe too.

    `place` is how others refer to it, "" for no way; those that are parts are put into `shared`.
    `root` has the definitions.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_part = is_part or place in shared or _n_parts(schema) > 1 or _needs_more(schema, root)
    if is_part and isinstance(reference := schema.get("$ref"), str):
        shared.add(reference)

    def part(keyword: str, name: str, inner: Any) -> Any:
        below = f"#/{keyword}/{name}" if place == "#" and keyword in DEFINING else ""
        return _close(inner, below, is_part and keyword in _SAME_OBJECT, shared, root)

    closed = with_parts(schema, part)
    if not is_part and _is_open(schema):
        closed["additionalProperties"] = False
    return closed


def _n_parts(schema: Mapping[str, Any]) -> int:
    """Count the schemas that describe this one's object beside each other."""
    alternatives = sum(key in schema for key in ("properties", "$ref", "anyOf", "oneOf", "then"))
    return alternatives + len(listed(schema, "allOf"))


def _needs_more(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Say whether properties are required that no part of the schema's object names.

    Of an object with many parts it is not said.
    """
    missing = {name for name in listed(schema, "required") if isinstance(name, str)}
    waiting: list[Any] = [schema]
    for _ in range(_MOST_LOOKED_AT):
        if not missing or not waiting:
            return bool(missing)
        one = waiting.pop()
        if isinstance(one, Mapping):
            properties, reference = one.get("properties"), one.get("$ref")
            if isinstance(properties, Mapping):
                missing = missing.difference(properties)
            for keyword in ("anyOf", "oneOf", "allOf"):
                waiting += listed(one, keyword)[:_MOST_LOOKED_AT]
            if isinstance(reference, str):
                waiting.append(definition(reference, root))
    return False


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Say whether a schema names properties, and leaves others open without saying so."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or "additionalProperties" in schema:
        return False
    return not schema.get("unevaluatedProperties") and "patternProperties" not in schema
