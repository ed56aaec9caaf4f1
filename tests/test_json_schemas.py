"""What is made of a schema: objects that are closed, and keywords that no grammar keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shardnet.errors import UsageError
from shardnet.json_schemas import KEPT_FORMATS, close_objects, relax

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}
CLOSED_B = {**B, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": B}, {**A, "additionalProperties": CLOSED_B}),
        ({**A, "patternProperties": {"^x": B}}, {**A, "patternProperties": {"^x": CLOSED_B}}),
        ({**A, "required": ["other"]}, {**A, "required": ["other"]}),
        ({"items": A, "prefixItems": [B]}, {"items": CLOSED_A, "prefixItems": [CLOSED_B]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({"allOf": [{"properties": {"x": A}}, B]}, {"allOf": [{"properties": {"x": CLOSED_A}}, B]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": A, "B": B}},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}},
        ),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"$ref": "#/$defs/C"}, "C": A}},
            {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"$ref": "#/$defs/C"}, "C": A}},
        ),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
    ],
)
def test_objects_have_the_properties_that_are_named(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before


def test_what_only_narrows_is_left_out_and_named() -> None:
    schema = {
        "properties": {
            "not": {"type": "array", "uniqueItems": True, "contains": {"const": 1}},
            "b": {"type": "string", "format": "iri", "pattern": "^a"},
            "c": {"anyOf": [{"not": {"const": 1}, "type": "integer"}]},
        },
        "dependentRequired": {"b": ["c"]},
    }
    relaxed, left_out = relax(schema)
    assert relaxed == {
        "properties": {
            "not": {"type": "array"},
            "b": {"type": "string", "pattern": "^a"},
            "c": {"anyOf": [{"type": "integer"}]},
        }
    }
    assert set(left_out) == {"uniqueItems", "contains", "format iri", "not", "dependentRequired"}
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(relaxed))


@pytest.mark.parametrize("name", sorted(KEPT_FORMATS))
def test_formats_that_stay_are_kept_by_grammars(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert relax(schema) == (schema, ())
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


class Bytes:
    """The tokens of a model that writes byte by byte."""

    tokens = (b"</s>", *(bytes([byte]) for byte in range(256)))
    special_token_ids = (0,)
    eos_token_id = 0
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return [1 + byte for byte in text]


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[0])


def takes(schema: dict[str, Any], value: Any) -> bool:
    """Say whether a value can be written by the grammar of a schema."""
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=spaced)
    assert not LLMatcher.validate_grammar(grammar)
    matcher = LLMatcher(TOKENIZER, grammar)
    token_ids = Bytes()(json.dumps(value).encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": A, "y": {"allOf": [{"$ref": "#/properties/x"}, B]}}},
        {"properties": {"y": {"allOf": [{"$ref": "#/$defs/X~1x"}, B]}}, "$defs": {"X/x": A}},
        {"properties": {"y": {"allOf": [{"$ref": "#/$defs/X%20x"}, B]}}, "$defs": {"X x": A}},
        {
            "properties": {"y": {"allOf": [{"$ref": "#x"}, B]}},
            "$defs": {"X": {"$anchor": "x", **A}},
        },
        {"properties": {"y": {"$ref": "#/properties/x/$defs/z", **B}, "x": {"$defs": {"z": A}}}},
        {"properties": {"y": {"allOf": [A], "required": ["a", "b"]}}},
        {"properties": {"y": {"$ref": "#/$defs/X", "required": ["b"]}}, "$defs": {"X": A}},
        {"properties": {"y": {"anyOf": [A, {"type": "null"}], "required": ["b"]}}},
    ],
)
def test_parts_of_an_object_stay_open_to_each_other(schema: dict[str, Any]) -> None:
    value = {"y": {"a": 1, "b": 2}}
    assert Draft202012Validator(schema).is_valid(value)
    assert takes(close_objects(schema), value)
    assert not takes(close_objects(schema), {"z": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"x": A}, "required": ["x"]}], "required": ["x"]},
        {"anyOf": [{"properties": {"x": A}}, {"properties": {"y": B}}], "required": ["x"]},
        {"$ref": "#/$defs/X", "required": ["x"], "$defs": {"X": {"properties": {"x": A}}}},
    ],
)
def test_what_is_required_of_a_part_that_names_it_opens_nothing(schema: dict[str, Any]) -> None:
    assert takes(close_objects(schema), {"x": {"a": 1}})
    assert not takes(close_objects(schema), {"x": {"a": 1}, "z": 1})


INT64 = (1 << 63) - 1


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "maximum": INT64}, INT64, INT64 + 1),
        ({"type": "integer", "minimum": -(1 << 53), "maximum": 1 << 53}, 1 << 53, (1 << 53) + 1),
        ({"type": "integer", "minimum": 10**17}, 10**20, 10**17 - 1),
        ({"type": "integer", "exclusiveMaximum": 1 - (1 << 53)}, -(1 << 53), 1 - (1 << 53)),
        ({"type": "number", "maximum": 1e17}, 10**17, 10**17 + 1),
        ({"type": "integer", "multipleOf": 1000}, 5000, 5001),
        ({"enum": [10**17, [{"a": 1.5}]]}, 10**17, 10**17 + 1),
    ],
)
def test_numbers_that_a_grammar_keeps_stay(
    schema: dict[str, Any], inside: int, outside: int
) -> None:
    assert relax(schema) == (close_objects(schema), ()) == (schema, ())
    assert takes(schema, inside)
    assert not takes(schema, outside)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("minimum", INT64 + 1),
        ("minimum", -INT64 - 1),
        ("minimum", 10**18),
        ("maximum", INT64 + 1),
        ("maximum", (1 << 64) - 1),
        ("maximum", (1 << 53) + 1),
        ("maximum", -(10**18)),
        ("maximum", 10**400),
        ("exclusiveMinimum", 10**30),
        ("exclusiveMaximum", 1 << 53),
        ("exclusiveMaximum", 1e300),
        ("multipleOf", 1 << 64),
        ("maxLength", INT64),
        ("const", (1 << 53) + 1),
        ("enum", [1, [{"a": 1 << 64}]]),
    ],
)
def test_numbers_that_no_grammar_keeps_are_named(keyword: str, value: Any) -> None:
    schema = {"properties": {"a": {"type": "integer", keyword: value}}}
    relaxed, left_out = relax(schema)
    assert relaxed == {"properties": {"a": {"type": "integer"}}}
    assert left_out == (f"{keyword} {value}"[:60],)
    assert takes(close_objects(relaxed), {"a": 1 << 70})
    with pytest.raises(UsageError) as caught:
        close_objects(schema)
    assert f"{keyword} {value}"[:60] in caught.value.message


def test_alternatives_of_which_one_must_hold_are_kept_where_their_types_differ() -> None:
    node = {"type": "object", "properties": {"next": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert relax(node)[1] == ()
    for schema in (node, relax(node)[0]):
        assert takes(close_objects(schema), {"next": {"next": None}})
        assert not takes(close_objects(schema), {"next": 1})
    tagged = {tag: {"properties": {"tag": {"const": tag}}, "required": ["tag"]} for tag in "ab"}
    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": tagged}
    relaxed, left_out = relax(union)
    assert left_out == ("oneOf",)
    assert takes(close_objects(relaxed), {"tag": "b"})
    assert not takes(close_objects(relaxed), {"tag": "c"})
    assert "oneOf" in close_objects(union)  # which llguidance refuses
    assert relax({"oneOf": [{}], "anyOf": [A], "allOf": [B]})[0] == {
        "anyOf": [A],
        "allOf": [B, {"anyOf": [{}]}],
    }
