"""llguidance's grammars of JSON schemas, and its verdict on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_SEPARATED: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators that models are trained to write."""

_MOST_PAIRS = 1000
_MOST_REFERENCES = 3
"""References followed in a row; any value satisfies what is behind them."""


def grammar_from(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a schema that it can enforce."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_SEPARATED)


def problem_of(grammar: str) -> str:
    """Return llguidance's error for a grammar, or an empty string."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar)
    return "" if problem.startswith("WARNING") else problem


@lru_cache(maxsize=256)
def problem_of_part(schema: str) -> str:
    """Return llguidance's error for a part, as JSON; a part may be unsatisfiable."""
    problem = problem_of(grammar_from(json.loads(schema)))
    return "" if "Unsatisfiable" in problem else problem


def all_disjoint(
    schemas: Sequence[Any], pairs: Sequence[tuple[int, int]], definitions: Mapping[str, Any]
) -> bool:
    """Return whether certainly no value satisfies both schemas of any pair.

    Parameters
    ----------
    schemas
        Schemas as llguidance takes them.
    pairs
        Pairs of their indices.
    definitions
        The targets of their references.
    """
    constants = [_constants(each, definitions) for each in schemas]
    unknown = [
        (one, other)
        for one, other in pairs
        if not any(
            constants[other].get(name, value) != value for name, value in constants[one].items()
        )
    ]
    if not unknown or len(unknown) > _MOST_PAIRS:
        return not unknown
    both = [{"allOf": [schemas[one], schemas[other]]} for one, other in unknown]
    levels = {
        f"{name}.{level}": _shallow(each, level - 1)
        for name, each in definitions.items()
        for level in range(1, _MOST_REFERENCES + 1)
    }
    anything = {"anyOf": _shallow(both, _MOST_REFERENCES), "$defs": levels}
    return "Unsatisfiable" in problem_of(grammar_from(anything))


def _shallow(schema: Any, level: int) -> Any:
    """Return a schema whose references point to definitions of a level, or to any value at 0."""
    match schema:
        case {"$ref": str(reference)}:
            return {"$ref": f"{reference}.{level}"} if level else True
        case Mapping():
            return {
                keyword: value if keyword in {"enum", "const"} else _shallow(value, level)
                for keyword, value in schema.items()
            }
        case list():
            return [_shallow(each, level) for each in schema]
    return schema


def _constants(schema: Any, definitions: Mapping[str, Any]) -> dict[str, str]:
    """Return the constants, texts or whole numbers, of an object's required properties."""
    whole = _target(schema, definitions)
    parts = [_target(part, definitions) for part in whole.get("allOf", [whole])]
    if not any(part.get("type") == "object" for part in parts):
        return {}
    required = {name for part in parts for name in part.get("required", ())}
    values = [
        (name, _target(value, definitions))
        for part in parts
        for name, value in part.get("properties", {}).items()
        if name in required
    ]
    return {
        name: json.dumps(value["const"])
        for name, value in values
        if isinstance(value.get("const"), str | int)
    }


def _target(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    if "$ref" in schema:
        return _target(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return schema
