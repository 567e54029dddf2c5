"""JSON schemas that answers follow, rewritten for llguidance."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from ragkv.config.json_schema.alternatives import DOCUMENT
from ragkv.config.json_schema.grammar import grammar_from, problem_of
from ragkv.config.json_schema.writer import SchemaPlace, SchemaWriter
from ragkv.errors import ConfigError, MissingDependencyError, install_command

__all__ = ["DOCUMENT", "Followed", "check_schema", "grammar_of", "resolved"]

logger = logging.getLogger(__name__)
_logged: set[str] = set()

_REFUSALS: Mapping[str, frozenset[str]] = {
    "min/maxProperties only": frozenset({"minProperties", "maxProperties"}),
    "patternProperty regexes": frozenset({"patternProperties", "additionalProperties"}),
    "multipleOf": frozenset({"multipleOf"}),
    "range": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "regex": frozenset({"pattern", "format"}),
}
"""llguidance's errors for valid schemas, and the keywords to leave out."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A schema prepared for llguidance.

    Attributes
    ----------
    schema, grammar
        llguidance's input and its grammar.
    ignored
        The keywords that cannot be enforced.
    problem
        Why no answer can follow the schema; otherwise empty.
    """

    schema: Mapping[str, Any]
    grammar: str
    ignored: tuple[SchemaPlace, ...]
    problem: str


def resolved(document: Mapping[str, Any]) -> Followed:
    """Prepare a JSON schema for llguidance.

    Raises
    ------
    ConfigError
        The document is not a schema.
    """
    without: frozenset[str] = frozenset()
    while True:
        writer = SchemaWriter(document, without)
        schema = writer.write()
        grammar = grammar_from(schema)
        problem = problem_of(grammar)
        more = next((words for text, words in _REFUSALS.items() if text in problem), without)
        if "Unsatisfiable" in problem or more <= without:
            return Followed(schema, grammar, tuple(writer.ignored), problem)
        without |= more


@lru_cache(maxsize=64)
def _followed(schema: str) -> Followed:
    return resolved(json.loads(schema))


def grammar_of(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a JSON schema that :func:`check_schema` has checked."""
    return _followed(json.dumps(schema)).grammar


def check_schema(name: str, schema: object) -> None:
    """Check a JSON schema before any computation.

    Each keyword that cannot be enforced is logged once; in a document with ``"strict": true`` it is
    an error.

    Raises
    ------
    ConfigError
        The document is not a schema, or no answer can follow it.
    MissingDependencyError
        llguidance is not installed.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{name} must be a JSON schema (a dict), not {type(schema).__name__}")
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
                f"{where} cannot be enforced, which strict requires: omit the keyword or strict"
            )
        if each.keyword not in _logged:
            _logged.add(each.keyword)
            logger.warning("%s cannot be enforced; answers follow the rest of the schema", where)
