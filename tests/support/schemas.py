"""Which JSON values a schema lets through, byte by byte."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ragkv.config.schema import resolved

_BYTES = LLTokenizer("byte")
_MOST = 3


def lets_through(schema: dict[str, Any], value: Any, *, closed: bool = True) -> bool:
    """Whether a value may be written, with up to three keys of its outer object in any order."""
    grammar = resolved(schema, closed=closed).grammar
    if not isinstance(value, dict) or len(value) > _MOST:
        return _writes(grammar, value)
    return any(_writes(grammar, dict(order)) for order in permutations(value.items()))


def _writes(grammar: str, value: Any) -> bool:
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    tokens = _BYTES.tokenize_str(json.dumps(value, ensure_ascii=False))
    if matcher.is_error() or matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return matcher.is_accepting()


def ignored(schema: dict[str, Any]) -> list[str]:
    """Return what of a schema cannot be followed, as ``"place: keyword"``."""
    return [f"{each.place}: {each.keyword}" for each in resolved(schema).ignored]
