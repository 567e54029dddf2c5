"""JSON schemas that answers follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from ragkv.errors import ConfigError, MissingDependencyError

_SEPARATED: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models are used to write JSON."""


def grammar_of(schema: str) -> str:
    """Return llguidance's grammar of a JSON schema, written as JSON; see :func:`check_schema`."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, defaults=_SEPARATED)


def check_schema(name: str, schema: object) -> None:
    """Check a JSON schema, before anything is computed for it.

    Raises
    ------
    ConfigError
        It is no schema, or one that llguidance cannot follow.
    MissingDependencyError
        llguidance is not installed.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{name} must be a JSON schema, a dict, not {type(schema).__name__}")
    if find_spec("llguidance") is None:
        raise MissingDependencyError(f"{name} needs llguidance: pip install 'ragkv[structured]'")
    try:
        problem = _problem_of(json.dumps(schema))
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"{name} cannot be followed: {problem}")


_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose members are schemas by name."""

_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose members are no schemas."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema whose objects have the properties that it names, and no others.

    Objects that say something of other properties themselves are left as they are.
    """
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, Mapping):
            out[keyword] = {name: _closed(each) for name, each in value.items()}
        elif keyword not in _VALUES:
            out[keyword] = _closed(value)
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    return out


def _closed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return closed_schema(value)
    return [_closed(each) for each in value] if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _problem_of(schema: str) -> str:
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar_of(schema))
    return "" if problem.startswith("WARNING") else problem
