"""llguidance's grammars of JSON schemas, and what it finds wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_SEPARATED: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models are used to write JSON."""


def grammar_from(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a schema that it can follow."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_SEPARATED)


def problem_of(grammar: str) -> str:
    """Return what llguidance finds wrong with a grammar; nothing is the empty string."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar)
    return "" if problem.startswith("WARNING") else problem


@lru_cache(maxsize=256)
def problem_of_part(schema: str) -> str:
    """Return what is wrong with a part of a schema, written as JSON, beside being unsatisfiable."""
    problem = problem_of(grammar_from(json.loads(schema)))
    return "" if "Unsatisfiable" in problem else problem
