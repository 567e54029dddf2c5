"""llguidance's grammars of JSON schemas and its errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators that models are trained to write."""

_MOST_PAIRS = 1000
"""Pairs of schemas that llguidance intersects."""

_MOST_REFERENCES = 3
"""References followed in a row when branches are compared."""

_TYPES = ("null", "boolean", "number", "string", "array", "object")


def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return llguidance's matcher, with ten times its default of alternatives that begin alike."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def grammar_from(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a schema that it can enforce."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_SEPARATORS)


def problem_of(grammar: str) -> str:
    """Return llguidance's error for a grammar, or an empty string."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar)
    return "" if problem.startswith("WARNING") else problem


def is_supported(schema: Mapping[str, Any]) -> bool:
    """Return whether llguidance can enforce a schema, which may be unsatisfiable."""
    problem = problem_of(grammar_from(schema))
    return not problem or "Unsatisfiable" in problem


def are_disjoint(branches: Sequence[Sequence[Any]], definitions: Mapping[str, Any]) -> bool:
    """Return whether certainly no value satisfies two branches of a ``oneOf``.

    Parameters
    ----------
    branches
        Each branch's alternatives, as llguidance takes them.
    definitions
        The targets of their references.
    """
    one_of = {"oneOf": [{"anyOf": each} for each in branches]}
    # llguidance compares branches but not references: the intersection replaces references.
    if is_supported({"allOf": [one_of, {"type": _TYPES}], "$defs": definitions}):
        return True
    alternatives = [
        (at, each, _constants(each, definitions))
        for at, branch in enumerate(branches)
        for each in branch
    ]
    pairs = [
        {"allOf": [one, other]}
        for (first, one, constants), (second, other, others) in combinations(alternatives, 2)
        if first != second
        and not any(others.get(name, value) != value for name, value in constants.items())
    ]
    if not pairs or len(pairs) > _MOST_PAIRS:
        return not pairs
    levels = {
        f"{name}.{level}": _shallow(each, level - 1)
        for name, each in definitions.items()
        for level in range(1, _MOST_REFERENCES + 1)
    }
    union = {"anyOf": _shallow(pairs, _MOST_REFERENCES), "$defs": levels}
    return "Unsatisfiable" in problem_of(grammar_from(union))


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
    objects = [part for part in parts if part.get("type") == "object"]
    required = {name for part in objects for name in part.get("required", ())}
    values = [
        (name, _target(value, definitions).get("const"))
        for part in parts
        for name, value in part.get("properties", {}).items()
        if name in required
    ]
    return {name: json.dumps(value) for name, value in values if isinstance(value, str | int)}


def _target(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(schema, Mapping) and "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema, Mapping) else {}
