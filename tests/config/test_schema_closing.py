"""Which objects are closed, and what references point to."""

from __future__ import annotations

import json

import pytest
from schemas import ignored, lets_through

from ragkv import Chat
from ragkv.config.json_schema import resolved
from ragkv.errors import ConfigError

A, B, C = ({"properties": {name: {"type": "boolean"}}} for name in "abc")
NODE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kids": {"items": {"$ref": "#/$defs/Node"}}},
    "required": ["ok"],
}


CLOSED = {
    "plain": (A, [{}, {"a": True}], [{"z": 1}, {"a": True, "z": 1}]),
    "nested": (
        {"properties": {"x": A, "y": {"items": A, "type": "array"}}},
        [{"x": {"a": True}, "y": [{"a": False}]}],
        [{"x": {"z": 1}}, {"y": [{"z": 1}]}],
    ),
    "no properties": ({"type": "object"}, [{}, {"z": {"y": 1}}], [1]),
    "no properties at all": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    "says true": ({**A, "additionalProperties": True}, [{"a": True, "z": 1}], [{"a": 1}]),
    "a dict": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"z": 1}],
        [{"z": "a"}],
    ),
    "by pattern": (
        {**A, "patternProperties": {"^x": {"type": "integer"}}},
        [{"a": True, "x1": 1, "z": None}],
        [{"x1": None}],
    ),
    "allOf beside properties": (
        {**A, "required": ["a"], "allOf": [{**B, "required": ["b"]}]},
        [{"a": True, "b": True}],
        [{"a": True}, {"a": True, "b": True, "z": 1}],
    ),
    "inherited": (
        {
            "$ref": "#/$defs/Base",
            "properties": {"b": {"type": "boolean"}},
            "required": ["b"],
            "$defs": {"Base": {"type": "object", **A, "required": ["a"]}},
        },
        [{"a": True, "b": True}],
        [{"b": True}, {"a": True, "b": True, "z": 1}],
    ),
    "inherited twice": (
        {
            "allOf": [{"$ref": "#/$defs/Middle"}, C],
            "$defs": {"Base": A, "Middle": {"allOf": [{"$ref": "#/$defs/Base"}, B]}},
        },
        [{"a": True, "b": True, "c": True}, {"c": True}],
        [{"z": 1}],
    ),
    "an open base": (
        {"allOf": [{**A, "additionalProperties": {"type": "boolean"}}, B]},
        [{"a": True, "b": True, "z": True}],
        [{"z": 1}],
    ),
    "union": ({"anyOf": [A, B]}, [{"a": True}, {"b": True}], [{"a": True, "b": True}, {"z": 1}]),
    "union beside properties": (
        {**A, "anyOf": [B, C]},
        [{"a": True, "b": True}, {"a": True, "c": False}],
        [{"b": True, "c": True}, {"z": 1}, {"b": 1}],
    ),
    "two unions": (
        {
            "type": "object",
            "allOf": [{"anyOf": [A, B]}, {"anyOf": [C, {"properties": {"d": True}}]}],
        },
        [{"a": True, "c": True}, {"b": True, "d": 1}],
        [{"a": True, "z": 1}],
    ),
    "a union of what is required": (
        {"properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "z": 1}],
    ),
    "a union that narrows": (
        {"properties": {"a": True, "b": True}, "anyOf": [A, {"required": ["b"]}]},
        [{"a": True, "b": 1}, {"a": 5, "b": 1}],
        [{"a": 5}, {"b": 1, "z": 1}],
    ),
    "an open object with a union": (
        {**A, "additionalProperties": True, "anyOf": [B, C]},
        [{"a": True, "b": True, "z": 1}],
        [{"b": 1, "c": 1}],
    ),
    "an open branch": (
        {**A, "anyOf": [{**B, "additionalProperties": True}, {"required": ["c"], **C}]},
        [{"a": True, "b": True, "z": 1}, {"a": True, "c": True}],
        [{"a": 1}],
    ),
    "oneOf": (
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        [{"a": True}, {"b": True}],
        [{}, {"a": True, "b": True}],
    ),
    "names in conditions": (
        {**A, "if": {"required": ["a"]}, "then": B, "else": C},
        [{"a": True, "b": True}, {"c": True}],
        [{"z": 1}],
    ),
    "names that others depend on": (
        {"type": "object", "properties": {"a": True}, "dependentRequired": {"b": ["c"]}},
        [{"a": 1, "c": 1}, {"b": 1, "c": 1}],
        [{"b": 1}, {"z": 1}],
    ),
    "recursive": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        [{"ok": True, "kids": [{"ok": False, "kids": []}]}],
        [{"ok": True, "kids": [{}]}, {"ok": True, "kids": [{"ok": True, "z": 1}]}],
    ),
    "recursive from the root": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        [{}, {"next": {"next": None}}],
        [{"next": {"z": 1}}, {"next": 1}],
    ),
    "recursive beside others": (
        {"properties": {"next": {"$ref": "#", "required": ["next"]}}},
        [{}],
        [{"next": {}}, {"z": 1}],
    ),
    "a property named after a keyword": (
        {"properties": {"properties": {"enum": [{"properties": 5}]}}},
        [{}, {"properties": {"properties": 5}}],
        [{"properties": 5}, {"z": 1}],
    ),
    "no type": ({**A, "title": "T"}, [{"a": True}], [1, "a", None]),
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_closed(name):
    schema, valid, invalid = CLOSED[name]
    assert [each for each in valid if not lets_through(schema, each)] == []
    assert [each for each in invalid if lets_through(schema, each)] == []


def test_a_discriminated_union_needs_its_discriminator():
    """pydantic requires it of values, and of schemas only where the field has no default."""
    cat = {
        "type": "object",
        "properties": {"kind": {"const": "cat", "default": "cat"}, **A["properties"]},
    }
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}, **B["properties"]}}
    schema = {
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {"Cat": cat, "Dog": dog},
    }
    assert ignored(schema) == []
    assert lets_through(schema, {"kind": "cat", "a": True})
    assert lets_through(schema, {"kind": "dog"})
    for wrong in ({}, {"a": True}, {"kind": "dog", "a": True}, {"kind": "cow"}):
        assert not lets_through(schema, wrong)


def test_a_recursive_discriminated_union():
    add = {
        "type": "object",
        "properties": {"op": {"const": "add"}, "left": {"$ref": "#/$defs/E"}},
        "required": ["op", "left"],
    }
    leaf = {"type": "object", "properties": {"op": {"const": "n"}, "n": {"type": "integer"}}}
    either = {"oneOf": [{"$ref": "#/$defs/Add"}, {"$ref": "#/$defs/N"}]}
    schema = {
        "$ref": "#/$defs/E",
        "$defs": {"E": {**either, "discriminator": {"propertyName": "op"}}, "Add": add, "N": leaf},
    }
    assert ignored(schema) == []
    inner = {"op": "add", "left": {"op": "n", "n": 3}}
    assert lets_through(schema, {"op": "add", "left": inner})
    assert not lets_through(schema, {"op": "add", "left": {"n": 3}})
    assert not lets_through(schema, {"op": "add", "left": {"op": "n", "z": 3}})


def test_properties_stay_in_the_order_of_the_document():
    base = {"properties": {"first": {"type": "null"}}, "required": ["first"]}
    own = {"properties": {"second": {"type": "null"}}, "required": ["second"]}
    assert list(resolved({"allOf": [base], **own}).schema["allOf"][0]["properties"]) == [
        "first",
        "second",
    ]


# ---- references

REFERENCES = {
    "#/$defs/a~1b": {"$defs": {"a/b": {"type": "null"}}},
    "#/$defs/a%25b": {"$defs": {"a%b": {"type": "null"}}},
    "#/definitions/x": {"definitions": {"x": {"type": "null"}}},
    "#/properties/n": {"properties": {"n": {"type": "null"}}},
    "#/anyOf/0/items": {"anyOf": [{"items": {"type": "null"}}]},
    "#/x-mine/y": {"x-mine": {"y": {"type": "null"}}},
    "#here": {"$defs": {"q": {"$anchor": "here", "type": "null"}}},
    "other.json": {
        "$id": "http://a.b/c.json",
        "$defs": {"q": {"$id": "other.json", "type": "null"}},
    },
    "urn:a:b": {"$defs": {"q": {"$id": "urn:a:b", "type": "null"}}},
    "http://a.b/d#in": {
        "$defs": {"q": {"$id": "http://a.b/d", "$defs": {"r": {"$anchor": "in", "type": "null"}}}}
    },
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference(reference):
    schema = {**REFERENCES[reference], "properties": {"v": {"$ref": reference}}, "type": "object"}
    schema["properties"] |= REFERENCES[reference].get("properties", {})
    assert lets_through(schema, {"v": None})
    assert not lets_through(schema, {"v": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "#nowhere"},
        {"$ref": 5},
        {"$ref": "#/$defs/x", "$defs": {"x": 5}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}], "type": "object"},
        {"allOf": {}},
        {"anyOf": 5},
        {"patternProperties": 5, "unevaluatedProperties": False},
        {"dependentRequired": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": 5}},
    ],
)
def test_references_that_point_to_nothing(schema):
    with pytest.raises(ConfigError, match=r"points to nothing|itself|must be"):
        resolved(schema)


def forced(*parameters: dict[str, object], **function: object) -> dict[str, object]:
    tools = [
        {"type": "function", "function": {"name": f"t{n}", "parameters": given, **function}}
        for n, given in enumerate(parameters)
    ]
    schema = Chat([], tools, "any").forced_schema
    assert schema is not None
    return json.loads(json.dumps(schema))


def call(name: str, /, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def test_references_of_tools_are_their_own():
    one = {"properties": {"x": {"$ref": "#/$defs/O"}}, "$defs": {"O": {"type": "integer"}}}
    two = {"properties": {"x": {"$ref": "#/$defs/O"}}, "$defs": {"O": {"type": "boolean"}}}
    three = {"properties": {"name": {"type": "integer"}, "y": {"$ref": "#/properties/name"}}}
    four = {
        "properties": {"again": {"$ref": "#"}, "arguments": {"$ref": "#/definitions/d"}},
        "definitions": {"d": {"type": "null"}},
    }
    named = {"$id": "http://a.b/c", "properties": {"x": {"$ref": "http://a.b/c#/$defs/O"}}}
    five = {**named, "$defs": {"O": {"const": 5}}}
    six = {**named, "$defs": {"O": {"const": 6}}}
    schema = forced(one, two, three, four, five, six)
    valid = [
        call("t0", x=1),
        call("t1", x=True),
        call("t2", name=1, y=2),
        call("t3", again={"again": {}, "arguments": None}),
        call("t4", x=5),
        call("t5", x=6),
    ]
    invalid = [
        call("t0", x=True),
        call("t1", x=1),
        call("t2", name=1, y="a"),
        call("t3", again={"name": "t3", "arguments": {}}),
        call("t4", x=6),
        call("t5", x=5),
        call("t0", z=1),
    ]
    assert [each for each in valid if not lets_through(schema, each)] == []
    assert [each for each in invalid if lets_through(schema, each)] == []


@pytest.mark.parametrize("parameters", [None, {}, {"$ref": "#/$defs/P", "$defs": {"P": A}}, A])
def test_arguments_are_an_object(parameters):
    schema = forced(parameters)
    assert lets_through(schema, call("t0"))
    assert not lets_through(schema, {"name": "t0", "arguments": "a"})
    assert not lets_through(schema, call("t0", z=1))
