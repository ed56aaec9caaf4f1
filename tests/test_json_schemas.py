"""What is made of a schema: objects that are closed, and keywords that no grammar keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

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
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A, "B": CLOSED_B}},
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
