"""Whether no value follows two schemas at once, so that ``oneOf`` means ``anyOf``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ragkv.config.json_schema.grammar import grammar_from, problem_of

_MOST_BRANCHES = 40
_MOST_REFERENCES = 3
"""References that are followed in a row; behind them a schema stands for any value."""


def all_disjoint(branches: Sequence[Any], definitions: Mapping[str, Any]) -> bool:
    """Return whether a value certainly follows at most one of the branches.

    Parameters
    ----------
    branches
        Schemas as llguidance takes them.
    definitions
        The schemas that their references name.
    """
    flat = [_without_references(each, definitions, _MOST_REFERENCES) for each in branches]
    if _have_own_constants(flat):
        return True
    if len(flat) > _MOST_BRANCHES:
        return False
    pairs = [{"allOf": list(pair)} for pair in combinations(flat, 2)]
    return not pairs or "Unsatisfiable" in problem_of(grammar_from({"anyOf": pairs}))


def _without_references(schema: Any, definitions: Mapping[str, Any], left: int) -> Any:
    """Return a schema with its references written out; of further ones nothing is known."""
    match schema:
        case {"$ref": str(reference)}:
            target = definitions[reference.rpartition("/")[2]]
            return _without_references(target, definitions, left - 1) if left else True
        case Mapping():
            return {
                keyword: value
                if keyword in {"enum", "const"}
                else _without_references(value, definitions, left)
                for keyword, value in schema.items()
            }
        case list():
            return [_without_references(each, definitions, left) for each in schema]
    return schema


def _have_own_constants(branches: Sequence[Any]) -> bool:
    """Return whether a required property has a different constant in every branch."""
    constants = [_constants(branch) for branch in branches]
    shared = set.intersection(*map(set, constants)) if constants else set()
    return any(len({each[name] for each in constants}) == len(constants) for name in shared)


def _constants(branch: Any) -> dict[str, str]:
    """Return the constants, texts or whole numbers, of an object's required properties."""
    if not isinstance(branch, Mapping) or branch.get("type") != "object":
        return {}
    found = {}
    for name in branch.get("required", ()):
        value = branch.get("properties", {}).get(name)
        if isinstance(value, Mapping) and isinstance(value.get("const"), str | int):
            found[name] = json.dumps(value["const"])
    return found
