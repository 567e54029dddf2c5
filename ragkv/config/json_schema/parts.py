"""The parts that a value has to follow all at once: a schema, its ``$ref`` and ``allOf``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.config.json_schema.references import ELSEWHERE, References
from ragkv.errors import ConfigError

Schema = Mapping[str, Any]

UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
UNKNOWN = frozenset({ELSEWHERE, "$dynamicRef", "$recursiveRef"})
"""Keywords for schemas that are not known."""

CONSTRAINTS = frozenset(
    {
        *(*UNKNOWN, "$ref", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "type", "enum", "const"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "items", "additionalItems", "prefixItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "minLength", "maxLength"),
        *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", *UNEVALUATED),
    }
)
"""Keywords that make values invalid; all others are annotations."""

MOST_PARTS = 200_000
"""Schemas that are read of one document; each counts as often as it is referred to."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
FALSE: Schema = {"enum": []}
_OWN = CONSTRAINTS - {"$ref", "allOf", *UNEVALUATED}


class SchemaParts:
    """Reads schemas as parts.

    Parameters
    ----------
    document
        The JSON schema that references point into. It must stay as it is.
    """

    def __init__(self, document: Schema) -> None:
        self._references = References(document)
        self._left = MOST_PARTS

    def of(self, schema: Any) -> list[Schema]:
        """Return a schema's parts in the order of the document, without ``$ref`` and ``allOf``.

        A part with an ``unevaluated…`` keyword is to be taken as a whole: it means that part's
        own ``$ref`` and ``allOf``, and no others.

        Raises
        ------
        ConfigError
            Something is no schema; a ``$ref`` points to nothing, or to itself.
        """
        return list(self._parts(schema, ()))

    def referred(self, schema: Any) -> Any:
        """Return what a schema that is nothing but a ``$ref`` points to; None if it is more."""
        seen: set[int] = set()
        found = None
        while isinstance(schema, Mapping) and schema.keys() & CONSTRAINTS == {"$ref"}:
            if id(schema) in seen:
                raise _endless(schema)
            seen.add(id(schema))
            found = schema = self._references.target(schema)
        return found

    def _parts(self, schema: Any, inside: tuple[int, ...]) -> Iterator[Schema]:
        self._left -= 1
        if self._left < 0:
            raise ConfigError("the schema is too large, once its references are written out")
        if isinstance(schema, bool):
            yield from () if schema else (FALSE,)
            return
        if not isinstance(schema, Mapping):
            raise ConfigError(f"a schema must be an object, true or false, not {schema!r}")
        if id(schema) in inside:
            raise _endless(schema)
        if inside and UNEVALUATED & schema.keys():
            yield schema
            return
        inside = (*inside, id(schema))
        _check(schema)
        own = {name: value for name, value in schema.items() if name in _OWN}
        if own and "discriminator" in schema:
            own["discriminator"] = schema["discriminator"]
        for keyword in schema:
            for each in self._others(schema, keyword):
                yield from self._parts(each, inside)
            if keyword in own and own:
                yield own
                own = {}

    def _others(self, schema: Schema, keyword: str) -> list[Any]:
        """Return what a keyword brings in that has to be followed, too."""
        if keyword == "allOf":
            return listed(schema, keyword)
        return [self._references.target(schema)] if keyword == "$ref" else []


def _check(schema: Schema) -> None:
    required, form = schema.get("required", []), schema.get("format", "")
    if not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise ConfigError(f"required must be a list of names beside properties, not {required!r}")
    if not isinstance(form, str):
        raise ConfigError(f"format must be a name, not {form!r}")


def listed(schema: Schema, keyword: str) -> list[Any]:
    """Return the schemas of a list.

    Raises
    ------
    ConfigError
        It is none.
    """
    given = schema[keyword]
    if not isinstance(given, list):
        raise ConfigError(f"{keyword} must be a list of schemas, not {given!r}")
    return given


def _endless(schema: Schema) -> ConfigError:
    return ConfigError(f"the schema {dict(schema)!r:.80} refers to itself and to nothing else")


@dataclass(frozen=True, slots=True)
class Union:
    """Schemas of which a value follows at least one, or exactly one (``oneOf``)."""

    branches: tuple[Any, ...]
    keyword: str
    discriminator: str | None = None


def unions_of(part: Schema) -> Iterator[Union]:
    """Yield the unions of a part: ``anyOf``, ``oneOf``, and what depends on a property."""
    given = part.get("discriminator")
    name = given.get("propertyName") if isinstance(given, Mapping) else None
    for keyword in ("anyOf", "oneOf"):
        if keyword in part:
            branches = tuple(listed(part, keyword))
            yield Union(branches, keyword, name if isinstance(name, str) else None)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        depending = part.get(keyword)
        for name, wanted in depending.items() if isinstance(depending, Mapping) else ():
            absent = {"type": [*TYPES], "properties": {name: False}}
            present = {"required": [name], "allOf": [wanted]}
            yield Union(
                (absent, {"required": wanted} if isinstance(wanted, list) else present), keyword
            )
