"""Keywords that cannot be followed: left out and said once, or refused where a schema is strict."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from schemas import ignored, lets_through, writes

from ragkv import Chat, DecodeConfig
from ragkv.config import json_schema
from ragkv.config.json_schema import check_schema, resolved
from ragkv.errors import ConfigError

N = {"type": "integer"}
NAMED = {"type": "object", "properties": {"a": N}}
CLOSED = {"type": "object", "unevaluatedProperties": False}


def node(name: str, **own: Any) -> dict[str, Any]:
    return {"properties": {"kids": {"items": {"$ref": f"#/$defs/{name}"}}, **own}}


LEFT_OUT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "format 'path'": ({"type": "string", "format": "path"}, ["/a", ""], [1]),
    "format 'password'": ({"type": "string", "format": "password", "writeOnly": True}, ["a"], [1]),
    "format 'mine'": ({"type": "string", "format": "mine", "maxLength": 2}, ["ab"], ["abc"]),
    "uniqueItems": ({"type": "array", "items": N, "uniqueItems": True}, [[1, 2]], [["a"]]),
    "contains": ({"type": "array", "items": N, "contains": {"const": 3}}, [[3]], [["a"]]),
    "not": ({"type": "integer", "not": {"const": 3}}, [4], ["a"]),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, [4, 1], ["a"]),
    "oneOf": ({"oneOf": [N, {"type": "number", "minimum": 2}]}, [1, 2.5], ["a"]),
    "oneOf, before unevaluatedProperties": (
        {"oneOf": [{**NAMED, "required": ["a"]}, {"properties": {"b": N}}], **CLOSED},
        [{"b": 1}],
        [{"b": "c"}, {"z": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"not": {"const": "a"}}, "additionalProperties": N},
        [{"b": 1}],
        [{"b": "c"}],
    ),
    "pattern": ({"type": "string", "pattern": "(?<=a)b", "maxLength": 2}, ["ab"], ["abc", 1]),
    "pattern, back-reference": ({"type": "string", "pattern": "(a)\\1"}, ["aa"], [1]),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^a": N, "b$": {"maximum": 3}},
            "maxProperties": 1,
        },
        [{"ab": 2}],
        [{"x": 1, "y": 1}],
    ),
    "maxProperties": (
        {"type": "object", "properties": {"a": N, "b": N, "c": N}, "maxProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": "x"}, {"z": 1}],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.123456789}, [0.123456789], ["a"]),
    "minimum": ({"type": "integer", "minimum": -1e30}, [5, -7], ["a", 1.5]),
    "unevaluatedItems": (
        {"type": "array", "anyOf": [{"prefixItems": [N]}, {"items": N}], "unevaluatedItems": False},
        [[1]],
        [1],
    ),
    "$ref to another document 'http://a.b/c'": (
        {"type": "object", "properties": {"a": {"$ref": "http://a.b/c"}, "b": N}},
        [{"a": [1], "b": 2}],
        [{"b": "x"}],
    ),
    "$dynamicRef '#q'": ({"type": "array", "items": {"$dynamicRef": "#q"}}, [[1]], [1]),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_rest_is_followed(name):
    schema, valid, invalid = LEFT_OUT[name]
    keyword = name.partition(",")[0]
    assert ignored(schema)[0].endswith(f": {keyword}")
    assert [each for each in valid if not lets_through(schema, each)] == []
    assert [each for each in invalid if lets_through(schema, each)] == []
    DecodeConfig(json_schema=schema)
    with pytest.raises(ConfigError, match=r"strict") as error:
        DecodeConfig(json_schema={**schema, "strict": True})
    assert keyword in str(error.value)


def test_each_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(json_schema, "_logged", set())
    here = {"type": "object", "properties": {"file": {"type": "string", "format": "path"}}}
    there = {"type": "object", "properties": {"x": here, "y": {"uniqueItems": True}}}
    with caplog.at_level(logging.WARNING):
        for schema in (here, here, there):
            check_schema("json_schema", schema)
    first, second = caplog.messages
    assert "file" in first and "path" in first  # noqa: PT018
    assert "y" in second and "uniqueItems" in second  # noqa: PT018


def test_strict_names_the_tool_the_parameter_and_the_keyword():
    inner = {"type": "object", "properties": {"paths": {"items": {"$ref": "#/$defs/P"}}}}
    given = {"properties": {"of": inner}, "$defs": {"P": {"type": "string", "format": "path"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": given, "strict": strict}}
        for name, strict in (("look", False), ("save", True))
    ]
    check_schema("tools", Chat([], tools, "look").forced_schema)
    with pytest.raises(ConfigError, match=r"'save'.*of\.paths\[\].*format 'path'"):
        check_schema("tools", Chat([], tools, "any").forced_schema)
    check_schema("tools", Chat([], tools, "look").forced_schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"not": True},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"properties": {"a": False}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "maxLength": 4, "format": "uuid"},
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"required": ["b"]}]},
    ],
)
def test_what_nothing_can_satisfy(schema):
    with pytest.raises(ConfigError, match="cannot be followed"):
        check_schema("json_schema", schema)


def test_a_schema_that_is_too_deep_or_too_large():
    """The large one has 2**30 parts once its references are followed."""
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    chain = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)}
    large = {"$ref": "#/$defs/a0", "$defs": {**chain, "a30": {"type": "object"}}}
    for schema, why in ((deep, "cannot be followed"), (large, "too large")):
        with pytest.raises(ConfigError, match=why):
            check_schema("json_schema", schema)


@pytest.mark.parametrize("beside", [{}, {"properties": {"n": N}}])
def test_a_large_union_of_classes(beside):
    made = {
        f"C{n}": {"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]}
        for n in range(300)
    }
    schema = {**beside, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in made], "$defs": made}
    assert ignored(schema) == []
    assert lets_through(schema, {"kind": 299})
    assert not lets_through(schema, {"kind": 300})


@pytest.mark.parametrize(
    ("keyword", "other", "constant"),
    [("anyOf", "b", int), ("oneOf", "b", int), ("oneOf", "b{}", str)],
)
def test_an_object_with_two_large_unions(keyword, other, constant):
    def union(name: str) -> dict[str, Any]:
        names = [(name.format(n), constant(n)) for n in range(25)]
        return {keyword: [{"properties": {p: {"const": c}}, "required": [p]} for p, c in names]}

    schema = {"type": "object", "properties": {"q": N}, "allOf": [union("a"), union(other)]}
    assert ignored(schema) == []
    grammar = resolved(schema).grammar
    assert writes(grammar, {"q": 1, "a": constant(24), other.format(7): constant(7)})
    assert not writes(grammar, {"q": 1, "a": constant(25), other.format(7): constant(7)})
    assert not writes(grammar, {"q": 1, "a": constant(24)})


def test_a_recursive_class_whose_base_inherits_and_is_open():
    base = {"$ref": "#/$defs/Root", **node("Base", n=N), "unevaluatedProperties": True}
    own = {"allOf": [{"$ref": "#/$defs/Base"}], **node("Node", m=N)}
    made = {"Root": node("Root"), "Base": base, "Node": own}
    with pytest.raises(ConfigError, match="circular"):
        check_schema("json_schema", {"$ref": "#/$defs/Node", "$defs": made})
