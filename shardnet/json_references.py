"""How JSON schemas stand within each other, refer to each other, and what types they allow.

Pure. The one place where references are read. Must not know what schemas are used for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from shardnet.errors import UsageError

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

DEFINING: Final = ("$defs", "definitions")

_ANCHORS: Final = ("$anchor", "$dynamicAnchor")

_NAMING: Final = frozenset(("$id", *_ANCHORS, *DEFINING))
"""Keywords that only say how others refer to a schema, or hold what they refer to."""

_NAMED: Final = frozenset(("properties", "patternProperties", "dependentSchemas", *DEFINING))

_TYPES: Final = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))

_TYPE_OF: Final = {bool: "boolean", str: "string", type(None): "null"}

_JOINED: Final[Mapping[str, Callable[..., frozenset[str]]]] = {
    "anyOf": frozenset.union,
    "oneOf": frozenset.union,
    "allOf": frozenset.intersection,
}

_MOST_NESTED: Final = 64

MOST_LOOKED_AT: Final = 128
"""Schemas of one value: what is asked of each of many values is not to take long."""

_HOLDS: Final[Mapping[str, type]] = {"properties": Mapping, "required": list}
"""What keywords hold where they say something."""

_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")

Part = Callable[[str, str, Any], Any]


def own_definitions(schema: Mapping[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
    """Return the schema with each schema that it refers to in its `$defs`, and nothing else there.

    A reference is a JSON pointer (RFC 6901) as the fragment of a URI, or the name of an `$anchor`,
    within the schema or a part of it that has an `$id`. What it leads to is written once, however
    many references there are. Raises UsageError for one that leads nowhere, which stays as it is
    without `is_strict`, and for a schema that is nested too deeply.
    """
    references = _References(schema, is_strict)
    try:
        references.find(schema, "")
        made = references.own(schema)
        definitions = references.definitions()
    except RecursionError:
        raise UsageError("schema: it is nested too deeply", remedy="give a flatter one") from None
    return {**made, "$defs": definitions} if definitions else made


def definition(reference: str, schema: Mapping[str, Any]) -> object:
    """Return what a reference leads to in a schema with definitions of its own, None if nowhere."""
    found = _follow(reference[1:], schema, "") if reference.startswith("#/") else None
    return found[0] if found is not None else None


def merged(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with what its `$ref` and its `allOf` say of the same value.

    `root` has the definitions; of many schemas the first are read. Of a keyword that several have
    the first counts, but all that is `required`, and all schemas of a property.
    """
    found: dict[str, Any] = {}
    properties: dict[str, Any] | None = None
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MOST_LOOKED_AT:
        one = waiting.pop(0)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        more = one.get("properties")
        if isinstance(more, Mapping) and "properties" in found:
            if properties is None:
                properties = found["properties"] = dict(found["properties"])
            for name, inner in more.items():
                is_known = name in properties
                properties[name] = {"allOf": [properties[name], inner]} if is_known else inner
        if "required" in found:
            found["required"] = [*found["required"], *listed(one, "required")]
        for keyword, value in one.items():
            if isinstance(value, _HOLDS.get(keyword, object)):
                found.setdefault(keyword, value)
        if isinstance(reference := one.get("$ref"), str):
            waiting.append(definition(reference, root))
        waiting += listed(one, "allOf")
    return found


def listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return what a keyword lists, nothing for what is no list."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows, none where it does not say.

    `root` has the definitions. Without "number" "integer" is meant alone.
    """
    found = _types(schema, root, {}, _MOST_NESTED)
    if found == _TYPES:
        return frozenset()
    return found - {"integer"} if "number" in found else found


def with_parts(schema: Mapping[str, Any], part: Part) -> dict[str, Any]:
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


class _References:
    """The references of a schema, and the schemas within it that they lead to.

    A place within it has a base: the URI of the innermost `$id` around it, "" where there is none.
    """

    def __init__(self, root: Mapping[str, Any], is_strict: bool) -> None:
        self._root = root
        self._is_strict = is_strict
        self._anchors: dict[str, tuple[Any, str]] | None = None
        """By URI: schemas that have one, each with the base of its place. Made when asked for."""
        self._seen: set[int] = set()
        self._new: dict[int, str] = {}
        """References to definitions, by the ids of the schemas in `root` that have them."""
        self._names: dict[int, str] = {}
        """Of definitions, by the ids of the schemas."""
        self._taken: set[str] = set()
        self._targets: list[tuple[str, Any, str]] = []
        """Their names, schemas and bases."""

    def find(self, schema: Any, base: str) -> None:
        """Find what a schema refers to, and what that refers to."""
        self._find(schema, base)
        for _name, target, base_there in self._targets:  # which grow
            self._find(target, base_there)

    def _find(self, schema: Any, base: str) -> Any:
        if isinstance(schema, Mapping) and id(schema) not in self._seen:
            self._seen.add(id(schema))
            base = _base(schema, base)
            with_parts(_unnamed(schema), lambda _keyword, _name, inner: self._find(inner, base))
            if isinstance(reference := schema.get("$ref"), str):
                self._new[id(schema)] = self._renamed(reference, base)
        return schema

    def own(self, schema: Any) -> Any:
        """Return a schema whose references lead to definitions, once all are found."""
        if not isinstance(schema, Mapping):
            return schema
        made = with_parts(_unnamed(schema), lambda _keyword, _name, inner: self._inner(inner))
        if id(schema) in self._new:
            made["$ref"] = self._new[id(schema)]
        return made

    def _inner(self, schema: Any) -> Any:
        """Return a schema within another, or a reference to it if it is a definition."""
        is_known = isinstance(schema, Mapping) and id(schema) in self._names
        return {"$ref": self._place(schema)} if is_known else self.own(schema)

    def definitions(self) -> dict[str, Any]:
        """Return what is referred to by name."""
        made = {}
        for name, schema, _base_there in self._targets:
            made[name] = self.own(schema)
            if isinstance(made[name], dict):
                made[name].pop("$schema", None)
        return made

    def _renamed(self, reference: str, base: str) -> str:
        """Return the reference to a definition that stands for this one."""
        target = self._target(reference, base)
        if target is None or not isinstance(target[0], Mapping | bool):
            if not self._is_strict:
                return reference
            raise UsageError(
                f"schema: $ref {reference[:100]!r} leads to no schema in it",
                remedy="refer to a part of it by a JSON pointer, such as #/$defs/NAME",
            )
        schema, base = target
        if id(schema) not in self._names:
            name = reference.rpartition("/")[2]
            if not _PLAIN_NAME.fullmatch(name) or name in self._taken:
                name = str(len(self._names))
            self._names[id(schema)] = name
            self._taken.add(name)
            self._targets.append((name, schema, base))
        return self._place(schema)

    def _place(self, schema: Any) -> str:
        return f"#/$defs/{self._names[id(schema)]}"

    def _target(self, reference: str, base: str) -> tuple[Any, str] | None:
        """Return where a reference leads, and the base there, None if nowhere."""
        before, _, fragment = reference.partition("#")
        uri = _joined(base, before)
        if uri == "":
            resource: tuple[Any, str] | None = (self._root, "")
        else:
            resource = self._named(uri)
        if resource is None or (fragment and not fragment.startswith("/")):
            return self._named(f"{uri}#{fragment}")
        return _follow(fragment, *resource)

    def _named(self, uri: str) -> tuple[Any, str] | None:
        """Return the schema with an `$id` or `$anchor`, and the base of its place."""
        if self._anchors is None:
            self._anchors = {}
            self._index(self._root, "")
        return self._anchors.get(uri)

    def _index(self, schema: Any, base: str) -> Any:
        if isinstance(schema, Mapping) and self._anchors is not None:
            inner_base = _base(schema, base)
            uris = {f"{inner_base}#{schema[key]}" for key in _ANCHORS if key in schema}
            if isinstance(own := schema.get("$id"), str):  # "#NAME" was an anchor up to draft 7
                uris.add(base + own if own[:1] == "#" else inner_base)
            for uri in uris:
                self._anchors.setdefault(uri, (schema, base))
            with_parts(schema, lambda _keyword, _name, inner: self._index(inner, inner_base))
        return schema


def _unnamed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without what only says how others refer to it, or what they refer to."""
    return {key: value for key, value in schema.items() if key not in _NAMING}


def _base(schema: Mapping[str, Any], base: str) -> str:
    """Return the base within a schema, from that of its place."""
    own = schema.get("$id")
    return _joined(base, own) if isinstance(own, str) and own[:1] != "#" else base


def _joined(base: str, reference: str) -> str:
    """Return the URI of a reference without its fragment."""
    try:
        return urldefrag(urljoin(base, reference)).url if reference else base
    except ValueError:  # no URI
        return reference


def _follow(fragment: str, place: Any, base: str) -> tuple[Any, str] | None:
    """Return where a JSON pointer in a URI's fragment leads from a place, and the base there."""
    for written in unquote(fragment).split("/")[1:]:
        step = written.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and step in place:
            base = _base(place, base)
            place = place[step]
        elif isinstance(place, list) and _INDEX.fullmatch(step) and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place, base


def _types(
    schema: object, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    """Return all types that a schema allows, "integer" beside "number".

    `known` are those of schemas by their ids; a schema that refers to itself adds none by that.
    """
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else _TYPES
    if id(schema) in known:
        return known[id(schema)]
    if depth == 0 or len(known) == MOST_LOOKED_AT:
        return _TYPES
    known[id(schema)] = frozenset()

    def inside(inner: object) -> frozenset[str]:
        return _types(inner, root, known, depth - 1)

    allowed = _said(schema)
    if isinstance(reference := schema.get("$ref"), str):
        allowed &= inside(definition(reference, root))
    for keyword, join in _JOINED.items():
        if every := listed(schema, keyword):
            allowed &= join(*map(inside, every))
    known[id(schema)] = allowed
    return allowed


def _said(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema's own `type`, `enum` and `const` allow."""
    allowed, said, listed = _TYPES, schema.get("type"), schema.get("enum")
    if isinstance(said, str | list):
        listed_kinds = [said] if isinstance(said, str) else said
        kinds = {kind for kind in listed_kinds if isinstance(kind, str)}
        allowed = frozenset(kinds | ({"integer"} if "number" in kinds else set()))
    for values in (listed, [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            allowed &= frozenset().union(*map(_types_of_value, values))
    return allowed


def _types_of_value(value: object) -> frozenset[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return frozenset({"number", "integer"} if value == value // 1 else {"number"})
    return frozenset(
        {_TYPE_OF.get(type(value), "object" if isinstance(value, Mapping) else "array")}
    )
