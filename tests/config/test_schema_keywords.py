"""Each keyword: what is valid may be written, and what is invalid cannot."""

from __future__ import annotations

from typing import Any

import pytest
from schemas import ignored, lets_through

A = {"type": "null"}
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": "integer"}, [0, -12], [1.5, "1", None, True, []]),
    "types": ({"type": ["string", "null"]}, ["", None], [0, False, {}]),
    "enum": ({"enum": ["a", 3, None, [1]]}, ["a", 3, None, [1]], ["b", 4, [2], True]),
    "const": ({"const": {"a": [True]}}, [{"a": [True]}], [{"a": [1]}, {}]),
    "minimum": ({"type": "integer", "minimum": -2}, [-2, 100], [-3]),
    "maximum": ({"type": "number", "maximum": 2.5}, [2.5, -7], [2.6]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 2}, [3], [2]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 2}, [1.9], [2]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 9, -6], [4]),
    "multipleOf of parts": ({"multipleOf": 0.01}, [0.25, 3, "a"], [0.251]),
    "minLength": ({"type": "string", "minLength": 2.0}, ["ab", "äöü"], ["a", ""]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "\U0001f600x"], ["abc"]),
    "pattern": ({"type": "string", "pattern": "b+"}, ["abbc"], ["ac"]),
    "pattern, anchored": ({"type": "string", "pattern": "^\\d{2}$"}, ["12"], ["123", "x12"]),
    "items": ({"type": "array", "items": {"type": "boolean"}}, [[], [True]], [[1]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        [[], [1]],
        [["a"], [1, 2]],
    ),
    "items, as they were written": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        [[1], [1, "a"]],
        [["a"], [1, 2]],
    ),
    "minItems": ({"type": "array", "minItems": 1}, [[0]], [[]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[], [0]], [[0, 0]]),
    "unevaluatedItems": (
        {"type": "array", "allOf": [{"prefixItems": [A]}], "unevaluatedItems": {"type": "string"}},
        [[None], [None, "a"]],
        [["a"], [None, 1]],
    ),
    "properties": ({"type": "object", "properties": {"a": A}}, [{}, {"a": None}], [{"a": 1}]),
    "required": (
        {"type": "object", "properties": {"a": A}, "required": ["a", "b"]},
        [{"a": None, "b": 5}],
        [{"a": None}, {"a": None, "b": 5, "c": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": A}, "additionalProperties": {"type": "integer"}},
        [{"a": None, "b": 1}, {}],
        [{"b": None}],
    ),
    "patternProperties": (
        {"patternProperties": {"^x": A}, "additionalProperties": False, "type": "object"},
        [{"x1": None}, {}],
        [{"x1": 1}, {"y": None}],
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": A, "b": A}, "minProperties": 1},
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{}],
    ),
    "maxProperties": (
        {"type": "object", "additionalProperties": A, "maxProperties": 1},
        [{}, {"q": None}],
        [{"q": None, "r": None}],
    ),
    "propertyNames by enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A},
        [{}, {"b": None}, {"a": None, "b": None}],
        [{"c": None}, {"a": 1}],
    ),
    "propertyNames by reference": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/E"},
            "$defs": {"E": {"enum": ["a"], "type": "string"}},
        },
        [{"a": 3}],
        [{"b": 3}],
    ),
    "propertyNames by pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        [{"ab": 1}],
        [{"b": 1}],
    ),
    "propertyNames by length": (
        {"type": "object", "propertyNames": {"minLength": 2}},
        [{"ab": 1}],
        [{"b": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": A, "b": A}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": None}, {"a": None, "b": None}],
        [{"a": None}],
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": A}, "required": ["b"]}}},
        [{"c": 1}, {"a": 1, "b": None}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "allOf": ({"allOf": [{"minimum": 2}, {"maximum": 3}], "type": "integer"}, [2, 3], [1, 4]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, [1, "a"], ["b", None]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"const": "a"}]}, [1, "a"], ["b", None]),
    "$ref beside others": (
        {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer", "minimum": 3}}},
        [3, 5],
        [2, 6],
    ),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": A}}],
            "unevaluatedProperties": {"type": "integer"},
        },
        [{"a": None, "b": 1}],
        [{"a": 1}, {"b": None}],
    ),
    "true": ({"type": "object", "properties": {"a": True}}, [{"a": [1, {"b": None}]}], [{"b": 1}]),
    "false": ({"type": "object", "properties": {"a": False}}, [{}], [{"a": 1}]),
    "date": (
        {"format": "date", "type": "string"},
        ["2024-02-29", "2000-02-29", "2023-12-31"],
        ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "23-01-01", "2023-1-1"],
    ),
    "time": (
        {"format": "time", "type": "string"},
        ["08:30:06Z", "23:59:59.25-08:00", "23:59:60Z"],
        ["08:30:06", "24:00:00Z", "22:59:60Z", "08:30Z", "08:30:06 PST"],
    ),
    "date-time": (
        {"format": "date-time", "type": "string"},
        ["2024-02-29T08:30:06Z", "1963-06-19t08:30:06.283185+01:00"],
        [
            "2023-02-29T08:30:06Z",
            "2024-02-29 08:30:06Z",
            "2024-02-29T08:30:06",
            "1998-12-31T22:59:60Z",
        ],
    ),
    "duration": ({"format": "duration"}, ["P4DT12H30M5S", "P2W"], ["PT1D", "P", "4D"]),
    "hostname": (
        {"format": "hostname"},
        ["a", "www.example.com", "a-1.b"],
        ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["a" * 60] * 5), ""],
    ),
    "ipv4": ({"format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        {"format": "ipv6"},
        ["::", "::1", "1::", "fe80::1:2", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8"],
        ["1", ":", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9"],
    ),
    "ipvanyaddress": ({"format": "ipvanyaddress"}, ["1.2.3.4", "::1"], ["1.2", "a"]),
    "uuid": (
        {"format": "uuid"},
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"],
    ),
    "uuid4": (
        {"format": "uuid4"},
        ["2eb8aa08-aa98-41ea-b4aa-73b441d16380"],
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
    ),
    "uri": ({"format": "uri"}, ["http://a.b/c?d#e", "urn:a:b"], ["//a.b/c", "a b", "\\\\WINDOWS"]),
    "email": ({"format": "email"}, ["joe@example.com"], ["joe", "joe@", "@example.com"]),
    "base64": ({"format": "base64"}, ["", "QUI=", "QUJD"], ["Q", "QUI", "QU_D"]),
    "format and length": ({"format": "uri", "maxLength": 10}, ["http://a"], ["http://a.example"]),
    "format and pattern": (
        {"format": "hostname", "pattern": "^w"},
        ["www.a"],
        ["a.b", "w-"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_keyword(name):
    schema, valid, invalid = CASES[name]
    assert ignored(schema) == []
    assert [each for each in valid if not lets_through(schema, each)] == []
    assert [each for each in invalid if lets_through(schema, each)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"not": False},
        {"if": {"type": "null"}},
        {"then": False},
        {"minContains": 3},
        {"contains": A, "minContains": 0},
        {"propertyNames": True},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"contentEncoding": "base64", "x-mine": 1, "$comment": "c", "deprecated": True},
    ],
)
def test_keywords_without_effect(schema):
    assert ignored(schema) == []
    assert all(lets_through(schema, each) for each in (None, 1, "a", [None], {"a": 1}))


def test_decimals_as_pydantic_once_wrote_them():
    schema = {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}
    assert ignored(schema) == []
    assert all(lets_through(schema, each) for each in ("1", "-0.25", ".5", "+3."))
    assert not any(lets_through(schema, each) for each in ("", "-", "+.", "1a", "."))
