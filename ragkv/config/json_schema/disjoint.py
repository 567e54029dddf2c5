"""Whether no value follows two schemas at once, so that ``oneOf`` means ``anyOf``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from ragkv.config.json_schema.parts import TYPES, UNKNOWN, Schema, SchemaParts, unions_of

_DEEPEST = 6
_MOST_BRANCHES = 40
_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}
_SAYS_MORE = frozenset(
    {
        *UNKNOWN,
        *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("anyOf", "oneOf", "dependentSchemas", "dependencies", "if", "then", "else"),
    }
)
"""Keywords that may say something of properties that a part does not name."""


def all_disjoint(branches: list[Any], parts: SchemaParts, *, closed: bool) -> bool:
    """Return whether it is certain that a value follows one of the branches at most.

    Parameters
    ----------
    closed
        Whether objects that say nothing of other properties have none.
    """
    sides = [parts.of(branch) for branch in branches]
    if all(_types(side) == {"object"} for side in sides):
        required = ({n for part in side for n in _strings(part.get("required"))} for side in sides)
        for name in set.intersection(*required) if sides else ():
            given = [_constants(parts.of(_property(name, side, closed=closed))) for side in sides]
            values = [each for each in given if each is not None]
            if len(values) == len(sides) and sum(map(len, values)) == len(set().union(*values)):
                return True
    if len(branches) > _MOST_BRANCHES:
        return False
    pairs = combinations(branches, 2)
    return all(are_disjoint(*pair, parts, closed=closed) for pair in pairs)


def are_disjoint(one: Any, other: Any, parts: SchemaParts, *, closed: bool, depth: int = 0) -> bool:
    """Return whether it is certain that no value follows both schemas."""
    if depth > _DEEPEST:
        return False
    sides = parts.of(one), parts.of(other)
    kinds = _types(sides[0]) & _types(sides[1])
    mine, theirs = map(_constants, sides)
    if not kinds or (mine is not None and theirs is not None and not mine & theirs):
        return True
    pairs = [*_of_unions(*sides), *_of_unions(*sides[::-1])]
    if kinds == {"object"}:
        pairs += _of_properties(*sides, closed=closed) + _of_properties(*sides[::-1], closed=closed)
    return any(
        all(are_disjoint(*pair, parts, closed=closed, depth=depth + 1) for pair in together)
        for together in pairs
    )


_Pairs = list[list[tuple[Any, Any]]]
"""Pairs of schemas; two schemas are disjoint where all pairs of one list are."""


def _of_unions(parts: list[Schema], others: list[Schema]) -> _Pairs:
    return [
        [(each, {"allOf": others}) for each in union.branches]
        for part in parts
        for union in unions_of(part)
        if union.keyword in {"anyOf", "oneOf"}
    ]


def _of_properties(parts: list[Schema], others: list[Schema], *, closed: bool) -> _Pairs:
    return [
        [(_property(name, parts, closed=closed), _property(name, others, closed=closed))]
        for name in {name for part in parts for name in _strings(part.get("required"))}
    ]


def _types(parts: list[Schema]) -> set[str]:
    """Return the types of values that follow all parts; numbers are integers, too."""
    left = {*TYPES, "integer"}
    for part in parts:
        given = part.get("type", list(TYPES))
        types = {given} if isinstance(given, str) else {*_strings(given)}
        left &= types | ({"integer"} if "number" in types else set())
    constants = _constants(parts)
    if constants is not None:
        left &= {_type(json.loads(each)) for each in constants}
    return left


def _type(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _NAMES[type(value)]


def _constants(parts: list[Schema]) -> set[str] | None:
    left: set[str] | None = None
    for part in parts:
        for given in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(given, list):
                values = {json.dumps(_plain(each), sort_keys=True) for each in given}
                left = values if left is None else left & values
    return left


def _plain(value: Any) -> Any:
    """Return a value whose whole numbers are written in one way."""
    match value:
        case bool():
            return value
        case int():
            return float(value) if abs(value) < 2**53 else value
        case list():
            return [_plain(each) for each in value]
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
    return value


def _property(name: str, parts: list[Schema], *, closed: bool) -> Any:
    """Return the schema of a property, as far as it is certain."""
    found = []
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif "additionalProperties" in part and "patternProperties" not in part:
            found.append(part["additionalProperties"])
    if found:
        return {"allOf": found}
    if any(_SAYS_MORE & part.keys() for part in parts):
        return True
    named = any("properties" in part for part in parts)
    required = any(name in _strings(part.get("required")) for part in parts)
    return not (closed and named and not required)


def _strings(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else []
