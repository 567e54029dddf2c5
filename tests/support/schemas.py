"""Classes whose schemas have it all, and which JSON values a schema lets through, byte by byte."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Annotated, Any, Literal

from llguidance import LLTokenizer
from pydantic import BaseModel, ConfigDict, Field

from ragkv.config.json_schema import resolved
from ragkv.config.json_schema.grammar import matcher_of

Letter = Literal["a", "b"]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    ok: bool


class Dog(BaseModel):
    kind: Literal["dog"]
    letter: Letter


class Node(BaseModel):
    ok: bool
    kids: list[Node] = Field([], max_length=1)


class Pets(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(
        min_length=1, max_length=2
    )
    letters: dict[Letter, bool]
    tree: Node


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    ok: bool


_BYTES = LLTokenizer("byte")
_MOST = 3


def lets_through(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value may be written, with up to three keys of its outer object in any order."""
    grammar = resolved(schema).grammar
    if not isinstance(value, dict) or len(value) > _MOST:
        return writes(grammar, value)
    return any(writes(grammar, dict(order)) for order in permutations(value.items()))


def writes(grammar: str, value: Any) -> bool:
    """Whether a value may be written with its keys in their order."""
    matcher = matcher_of(grammar, _BYTES)
    tokens = _BYTES.tokenize_str(json.dumps(value, ensure_ascii=False))
    if matcher.is_error() or matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return matcher.is_accepting()


def ignored(schema: dict[str, Any]) -> list[str]:
    """Return what of a schema cannot be followed, as ``"place: keyword"``."""
    return [f"{each.place}: {each.keyword}" for each in resolved(schema).ignored]
