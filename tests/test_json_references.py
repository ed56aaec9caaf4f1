"""References of schemas lead where JSON pointers lead, and types are what instances may have."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from shardnet.api.chat_formats.json_text import read_tools
from shardnet.errors import UsageError
from shardnet.json_references import own_definitions, types_of
from shardnet.json_schemas import close_objects, relax

TEXT = {"type": "string"}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}


def of(whole: dict[str, Any]) -> Any:
    """Return the definition that a schema refers to at its beginning."""
    made = own_definitions(whole)
    assert made["$ref"].startswith("#/$defs/")
    return made["$defs"][made["$ref"].removeprefix("#/$defs/")]


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/properties/a", {"properties": {"a": TEXT}}),
        ("#/properties/a/anyOf/1", {"properties": {"a": {"anyOf": [{}, TEXT]}}}),
        ("#/properties/a/$defs/b", {"properties": {"a": {"$defs": {"b": TEXT}}}}),
        ("#/items", {"items": TEXT}),
        ("#/prefixItems/10", {"prefixItems": [*[{}] * 10, TEXT]}),
        ("#/not", {"not": TEXT}),
        ("#/x-other/y", {"x-other": {"y": TEXT}}),
        ("#/$defs/a~1b~0c", {"$defs": {"a/b~c": TEXT}}),
        ("#/$defs/~01", {"$defs": {"~1": TEXT}}),
        ("#/$defs/a%25b%20c", {"$defs": {"a%b c": TEXT}}),
        ("#/$defs%2Fa", {"$defs": {"a": TEXT}}),
        ("#/$defs/%C3%A9", {"$defs": {"é": TEXT}}),
        ("#/$defs/é[int]", {"$defs": {"é[int]": TEXT}}),
        ("#/$defs/", {"$defs": {"": TEXT}}),
        ("#/definitions/0", {"definitions": {"0": TEXT}}),
        ("#name", {"$defs": {"a": {"$anchor": "name", **TEXT}}}),
        ("#name", {"definitions": {"a": {"$id": "#name", **TEXT}}}),
        ("http://x.y/s#/$defs/a", {"$id": "http://x.y/s", "$defs": {"a": TEXT}}),
        ("s#name", {"$id": "http://x.y/s", "$defs": {"a": {"$anchor": "name", **TEXT}}}),
        ("t", {"$id": "http://x.y/s", "$defs": {"a": {"$id": "http://x.y/t", **TEXT}}}),
        ("urn:a:b#/$defs/c", {"$defs": {"a": {"$id": "urn:a:b", "$defs": {"c": TEXT}}}}),
        ("#/$defs/a/$defs/c", {"$defs": {"a": {"$id": "urn:a:b", "$defs": {"c": TEXT}}}}),
    ],
)
def test_a_reference_leads_where_its_pointer_does(reference: str, more: dict[str, Any]) -> None:
    whole = {"$ref": reference, **more}
    before = json.dumps(whole)
    assert of(whole) == TEXT
    assert json.dumps(whole) == before


def test_a_part_with_an_id_is_the_whole_of_references_within_it() -> None:
    inner = {"$id": "http://x.y/t", "$ref": "#/$defs/u", "$defs": {"u": {"type": "null"}}}
    whole = {"$ref": "#/$defs/t", "$defs": {"t": inner, "u": TEXT}}
    assert own_definitions(whole) == {
        "$ref": "#/$defs/t",
        "$defs": {"t": {"$ref": "#/$defs/u"}, "u": {"type": "null"}},
    }


def test_what_refers_to_itself_has_one_definition() -> None:
    made = own_definitions({"$schema": "https://json-schema.org/draft/2020-12/schema", **TREE})
    (name,) = made["$defs"]
    assert made["properties"]["kids"]["items"] == {"$ref": f"#/$defs/{name}"}
    assert made["$defs"][name]["properties"]["kids"]["items"] == {"$ref": f"#/$defs/{name}"}
    assert "$schema" not in made["$defs"][name]
    assert own_definitions(made) == made


def test_what_is_not_referred_to_is_left_out_and_values_are_no_schemas() -> None:
    values = {"enum": [{"$ref": "#/gone", "$id": "x"}], "default": {"$ref": "#/gone"}}
    named = {"properties": {"$defs": TEXT, "$id": TEXT, "$ref": TEXT}}
    assert own_definitions({**values, **named, "$defs": {"a": {}}}) == {**values, **named}


@pytest.mark.parametrize(
    "reference",
    [
        "#/$defs/b",
        "#/$defs/a/type",
        "#/anyOf/1",
        "#/anyOf/00",
        "#/anyOf/-",
        "#/anyOf/" + "9" * 5000,
        "#name",
        "http://127.0.0.1:9/",
        "http://[",
        "other.json#/$defs/a",
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_by_name(reference: str) -> None:
    whole = {"$ref": reference, "$defs": {"a": TEXT}, "anyOf": [{}]}
    with pytest.raises(UsageError) as caught:
        own_definitions(whole)
    assert repr(reference[:100]) in caught.value.message
    assert own_definitions(whole, is_strict=False)["$ref"] == reference


def test_schemas_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {"items": {"$ref": "#"}}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested too deeply"):
        own_definitions(deep)


def test_what_is_referred_to_is_written_once_also_within_what_is_referred_to_too() -> None:
    """Else a request of some kilobytes would take seconds, in which all others wait."""
    whole: dict[str, Any] = {"description": "innermost"}
    for _ in range(100):
        whole = {"items": whole}
    whole["anyOf"] = [{"$ref": "#" + "/items" * depth} for depth in range(1, 101)]
    made = own_definitions(whole)
    assert json.dumps(made).count("innermost") == 1
    assert len(made["$defs"]) == 100
    assert made["items"] == made["anyOf"][0]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["number", "integer", "null"]}, {"number", "null"}),
        ({"$ref": "#/$defs/t"}, {"string"}),
        ({"$ref": "#/$defs/t", "type": ["string", "integer"]}, {"string"}),
        ({"$ref": "#/$defs/gone"}, set()),
        ({"$ref": "http://x.y/"}, set()),
        ({"anyOf": [{"$ref": "#/$defs/t"}, {"const": None}]}, {"string", "null"}),
        ({"anyOf": [{"const": f"{n}"} for n in range(99)]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"oneOf": [{"type": "string"}, False]}, {"string"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, {"string"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"enum": [1, 2.0]}, {"number"}),
        ({"enum": ["1"], "type": ["string", "integer"]}, {"string"}),
        ({"const": 1.5}, {"number"}),
        ({"const": []}, {"array"}),
        ({"enum": [{}, True]}, {"object", "boolean"}),
        ({"type": "float"}, {"float"}),
        ({"type": [{}]}, set()),
        ({"description": "any"}, set()),
        (True, set()),
    ],
)
def test_types_are_what_all_parts_of_a_schema_allow(schema: Any, types: set[str]) -> None:
    assert types_of(schema, {"$defs": {"t": TEXT}}) == types


NAMES = ["a", "b/c", "d~e", "f%g", "é x"]
WRITTEN = ["a", "b~1c", "d~0e", "f%25g", "%C3%A9%20x"]
PLACES = [
    *("#", "#/properties/q", "#/items"),
    *(f"#/$defs/{name}" for name in WRITTEN),
]
KINDS = ["string", "integer", "number", "null", "boolean", "array", "object"]
PLAIN = st.one_of(
    st.sampled_from(KINDS).map(lambda kind: {"type": kind}),
    st.sampled_from([1, 1.5, "1", None, True]).map(lambda value: {"const": value}),
    st.lists(st.sampled_from([0, 2.5, "x", False]), min_size=1).map(lambda all_: {"enum": all_}),
    st.just({}),
)
# What refers stands inside of values, so that no schema refers to itself for the same value.
INSIDE = st.one_of(PLAIN, st.sampled_from(PLACES).map(lambda place: {"$ref": place}))
SCHEMAS = st.recursive(
    st.one_of(
        PLAIN,
        st.dictionaries(st.sampled_from("pq"), INSIDE).map(lambda each: {"properties": each}),
        INSIDE.map(lambda inner: {"type": "array", "items": inner}),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda keyword, every: {keyword: every},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda one, other: {**one, **other}, inner, PLAIN),
    ),
    max_leaves=5,
)
WHOLES = st.builds(
    lambda first, items, *defined: {
        "properties": {"q": {"anyOf": [first]}},
        "items": items,
        "$defs": dict(zip(NAMES, defined, strict=True)),
    },
    *[SCHEMAS] * (2 + len(NAMES)),
)
VALUES = st.recursive(
    st.sampled_from([0, 1, 2.5, "1", "x", None, True, False]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("pq"), inner)
    ),
    max_leaves=4,
)
TYPE_OF = dict(zip([str, int, float, type(None), bool, list, dict], KINDS, strict=True))


@settings(max_examples=200, deadline=None)
@given(whole=WHOLES, value=VALUES, place=st.sampled_from(PLACES[2:]))
def test_with_own_definitions_a_schema_allows_what_it_allowed(
    whole: dict[str, Any], value: Any, place: str
) -> None:
    judge = Draft202012Validator(whole)
    made = own_definitions(whole)
    assert Draft202012Validator(made).is_valid(value) == judge.is_valid(value)
    # An argument that is lifted out of it keeps what it refers to, and has the types of its values.
    argument = {"anyOf": [{"$ref": place}, whole["properties"]["q"]]}
    lifted = own_definitions({**whole, "properties": {"q": argument}})
    q, defined = lifted["properties"]["q"], lifted.get("$defs", {})
    judge = Draft202012Validator({**whole, "properties": {"q": argument}})
    is_valid = judge.evolve(schema=argument).is_valid(value)
    assert Draft202012Validator({**q, "$defs": defined}).is_valid(value) == is_valid
    types = types_of(q, lifted)
    if is_valid and types:
        allowed = types | ({"integer"} if "number" in types else set())
        assert TYPE_OF[type(value)] in allowed


KEYWORDS = (
    *("$ref", "$id", "$anchor", "$defs", "type", "enum", "const", "anyOf", "oneOf", "allOf", "not"),
    *("properties", "required", "items", "additionalProperties", "minimum", "maximum"),
)
JUNK = st.recursive(
    st.sampled_from([None, True, 1, 1 << 70, 1.5, "", "a", "#", "#a", "#/a/0", *PLACES]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), JUNK, max_size=6))
def test_what_is_no_schema_is_refused_or_left_to_the_compiler(schema: dict[str, Any]) -> None:
    [tool] = read_tools([{"name": "f", "parameters": schema}]).values()
    assert tool.types_of("a") is not None
    for make in (relax, close_objects):
        with contextlib.suppress(UsageError):
            make(schema)
