"""JSON schemas that answers follow."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from ragkv.config.json_schema.grammar import grammar_from, problem_of
from ragkv.config.json_schema.parts import SchemaParts
from ragkv.config.json_schema.references import DOCUMENT
from ragkv.config.json_schema.resolver import Ignored, Resolver
from ragkv.errors import ConfigError, MissingDependencyError, install_command

__all__ = ["DOCUMENT", "Followed", "check_schema", "grammar_of", "resolved"]

logger = logging.getLogger(__name__)
_told: set[str] = set()

_REFUSALS: Mapping[str, frozenset[str]] = {
    "min/maxProperties only": frozenset({"minProperties", "maxProperties"}),
    "patternProperty regexes": frozenset({"patternProperties", "additionalProperties"}),
    "multipleOf": frozenset({"multipleOf"}),
    "circular references": frozenset({"allOf"}),
    "stack level": frozenset({"allOf"}),
    "range": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "regex": frozenset({"pattern", "format"}),
}
"""What llguidance says of schemas that are right, and the keywords that it then cannot follow."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A schema as answers follow it.

    Attributes
    ----------
    schema, grammar
        As llguidance takes them.
    ignored
        What of the given schema cannot be followed.
    problem
        Why no answer can follow it; otherwise empty.
    """

    schema: Mapping[str, Any]
    grammar: str
    ignored: tuple[Ignored, ...]
    problem: str


def resolved(document: Mapping[str, Any], *, closed: bool = True) -> Followed:
    """Return a JSON schema as answers follow it.

    Parameters
    ----------
    closed
        Whether objects have the properties that are named, and no others, where their schema says
        nothing of others: :mod:`ragkv.config.json_schema.closing`.

    Raises
    ------
    ConfigError
        It is no schema.
    """
    without: frozenset[str] = frozenset()
    parts = SchemaParts(document)
    while True:
        resolver = Resolver(parts, closed, without)
        schema = resolver.resolve(document)
        grammar = grammar_from(schema)
        problem = problem_of(grammar)
        more = next((_REFUSALS[said] for said in _REFUSALS if said in problem), frozenset())
        if "Unsatisfiable" in problem or more <= without:
            return Followed(schema, grammar, tuple(resolver.ignored), problem)
        without |= more


@lru_cache(maxsize=64)
def _followed(schema: str) -> Followed:
    return resolved(json.loads(schema))


def grammar_of(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a JSON schema that :func:`check_schema` has checked."""
    return _followed(json.dumps(schema)).grammar


def check_schema(name: str, schema: object) -> None:
    """Check a JSON schema, before anything is computed for it.

    Keywords that cannot be followed are logged once each; where the schema has ``"strict": true``
    they are an error.

    Raises
    ------
    ConfigError
        It is no schema, or one that cannot be followed.
    MissingDependencyError
        llguidance is not installed.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{name} must be a JSON schema, a dict, not {type(schema).__name__}")
    if find_spec("llguidance") is None:
        raise MissingDependencyError(f"{name} needs llguidance: {install_command('structured')}")
    try:
        followed = _followed(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be followed: {error}") from error
    if followed.problem:
        raise ConfigError(f"{name} cannot be followed: {followed.problem}")
    for each in followed.ignored:
        where = f"{each.document or name}, {each.place or 'the whole'}: {each.keyword}"
        if each.strict:
            raise ConfigError(
                f"{where} cannot be enforced, as strict asks for: omit it, or omit strict"
            )
        if each.keyword not in _told:
            _told.add(each.keyword)
            logger.warning("%s cannot be enforced; answers follow the rest of the schema", where)
