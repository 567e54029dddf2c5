"""The alternatives of a JSON schema: what a value has to satisfy, without references and unions.

A schema is written as a disjunction of conjunctions. ``$ref`` and ``allOf`` add parts to each
alternative; each branch of ``anyOf`` and ``oneOf`` gives an alternative of its own, and so does the
presence or absence of a property that others depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any
from urllib.parse import unquote, urljoin

from ragkv.errors import ConfigError

Schema = Mapping[str, Any]

UNIONS = ("anyOf", "oneOf")
CONDITIONS = ("if", "then", "else")
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", *DEPENDENT})
"""Keywords whose members are schemas by name."""

DIRECT = frozenset(
    {
        *("allOf", *UNIONS, "not", *CONDITIONS, "prefixItems", "items", "additionalItems"),
        *("contains", "additionalProperties", "propertyNames", *UNEVALUATED),
    }
)
"""Keywords whose value is a schema or a list of schemas."""

DOCUMENT = "x-document"
"""Keyword of an embedded schema that is a document of its own: its references point into it, and
its ``strict`` applies to it only. Messages name the document by the keyword's value."""

ELSEWHERE = "$ref to another document"
"""Keyword that stands for a schema of another document."""

UNKNOWN = frozenset({ELSEWHERE, "$dynamicRef", "$recursiveRef"})
"""Keywords for schemas that are not known."""

COPIED = (
    *("type", "enum", "const", "required", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
CONSTRAINTS = frozenset(
    {
        *((NAMED | DIRECT | UNKNOWN) - {"$defs", "definitions"}),
        *(*COPIED, "$ref", "uniqueItems", "minContains", "maxContains", "pattern", "format"),
    }
)
"""Keywords that can make values invalid; all others are annotations."""

_OWN = CONSTRAINTS - {"$ref", "allOf", *UNIONS, *DEPENDENT, *UNEVALUATED}

MOST_EXPANDED = 50_000
"""Alternatives of all schemas of a document; a schema counts as often as it is referred to."""

FALSE: Schema = {"enum": []}


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """Keywords of one schema in an alternative.

    Attributes
    ----------
    keywords
        Without ``$ref``, ``allOf`` and unions. A nested schema with an ``unevaluated`` keyword is
        complete, because the keyword refers to that schema's own ``$ref`` and ``allOf``.
    closes
        Whether ``properties`` in the part close the object.
    enforced
        False for a part that only names properties, e.g. a condition.
    """

    keywords: Schema
    closes: bool = True
    enforced: bool = True


@dataclass(frozen=True, slots=True)
class Alternative:
    """Parts that a value satisfies together.

    Attributes
    ----------
    parts
        In the order of the document.
    branches
        The index of the chosen branch of each union, by the union's keyword and identity.
    """

    parts: tuple[SchemaPart, ...] = ()
    branches: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def __add__(self, other: Alternative) -> Alternative:
        return Alternative(self.parts + other.parts, {**self.branches, **other.branches})


class Alternatives:
    """Reads the alternatives of a document's schemas.

    Parameters
    ----------
    document
        The JSON schema that references point into. Do not change it afterwards.
    """

    def __init__(self, document: Schema) -> None:
        self._references = References(document)
        self._left = MOST_EXPANDED

    def of(self, schema: Any) -> list[Alternative]:
        """Return a schema's alternatives.

        Raises
        ------
        ConfigError
            A part of it is not a schema; a ``$ref`` points to nothing or only to itself.
        """
        found = self._expand(schema, ())
        if not found:
            raise ConfigError(
                f"the schema {dict(schema)!r:.80} refers to itself and to nothing else"
            )
        return found

    def referred(self, schema: Any) -> Any:
        """Return the target of a schema whose only constraint is a ``$ref``; otherwise itself."""
        refers = isinstance(schema, Mapping) and schema.keys() & CONSTRAINTS == {"$ref"}
        return self._references.target(schema) if refers else schema

    def _expand(self, schema: Any, inside: tuple[int, ...]) -> list[Alternative]:
        """Return a schema's alternatives; none for one that is being expanded already."""
        if isinstance(schema, bool):
            return [Alternative(() if schema else (SchemaPart(FALSE),))]
        if not isinstance(schema, Mapping):
            raise ConfigError(f"a schema must be an object, true or false, not {schema!r}")
        if id(schema) in inside:
            return []
        if inside and UNEVALUATED & schema.keys():
            return [Alternative((SchemaPart(schema),))]
        factors = list(self._factors(schema, (*inside, id(schema))))
        self._left -= 1 + prod(map(len, factors))
        if self._left < 0:
            raise ConfigError("the schema is too large, once its references are written out")
        return [sum(chosen, Alternative()) for chosen in product(*factors)]

    def _factors(self, schema: Schema, inside: tuple[int, ...]) -> Iterator[list[Alternative]]:
        """Yield, for each keyword in the document's order, the alternatives that it adds."""
        _check(schema)
        own = {name: value for name, value in schema.items() if name in _OWN}
        first = next(iter(own), None)
        for keyword, value in schema.items():
            if keyword == "$ref":
                yield self._expand(self._references.target(schema), inside)
            elif keyword == "allOf":
                yield from [self._expand(each, inside) for each in listed(schema, keyword)]
            elif keyword in UNIONS:
                yield list(self._union(schema, keyword, inside))
            elif keyword in DEPENDENT and isinstance(value, Mapping):
                yield from [list(self._dependency(*each, inside)) for each in value.items()]
            elif keyword in CONDITIONS:
                parts = [part for each in self._expand(value, inside) for part in each.parts]
                yield [Alternative(tuple(replace(p, closes=False, enforced=False) for p in parts))]
            if keyword == first:
                yield [Alternative((SchemaPart(own),))]

    def _union(
        self, schema: Schema, keyword: str, inside: tuple[int, ...]
    ) -> Iterator[Alternative]:
        discriminator = Alternative()
        match schema.get("discriminator"):
            case {"propertyName": str(name)}:
                discriminator = Alternative((SchemaPart({"required": [name]}),))
        given = listed(schema, keyword) or [False]
        for index, branch in enumerate(given):
            chosen = Alternative((), {(keyword, id(given)): index}) + discriminator
            yield from (each + chosen for each in self._expand(branch, inside))

    def _dependency(self, name: str, needed: Any, inside: tuple[int, ...]) -> Iterator[Alternative]:
        """Yield the alternatives without a property, and with it and with what it needs."""
        rest = {"required": needed} if isinstance(needed, list) else needed
        absent = SchemaPart({"properties": {name: False}}, closes=False)
        named = (SchemaPart(rest, closes=False, enforced=False),) if rest is not needed else ()
        yield Alternative((absent, *named))
        present = SchemaPart({"required": [name]}, closes=False)
        for each in self._expand(rest, inside):
            parts = (replace(part, closes=False) for part in each.parts)
            yield Alternative((present, *parts), each.branches)


def _check(schema: Schema) -> None:
    required, form = schema.get("required", []), schema.get("format", "")
    if not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise ConfigError(f"required must be a list of names beside properties, not {required!r}")
    if not isinstance(form, str):
        raise ConfigError(f"format must be a name, not {form!r}")


def listed(schema: Schema, keyword: str) -> Sequence[Any]:
    """Return a keyword's list of schemas; raises ConfigError if it is not a list."""
    given = schema[keyword]
    if not isinstance(given, list):
        raise ConfigError(f"{keyword} must be a list of schemas, not {given!r}")
    return given


class References:
    """The schemas of a document by address: ``$id``, ``$anchor`` and JSON pointers.

    Parameters
    ----------
    document
        A JSON schema. Do not change it afterwards.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._known: dict[tuple[int, str], Any] = {(0, ""): document}
        self._places: dict[int, tuple[int, str]] = {}
        self._elsewhere: dict[str, Any] = {}
        self._index(document, 0, "")

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a schema's ``$ref`` points to.

        For a reference to another document, this is a schema whose only keyword is
        :data:`ELSEWHERE`.

        Raises
        ------
        ConfigError
            The reference points to nothing.
        """
        reference = schema["$ref"]
        document, base = self._places[id(schema)]
        if isinstance(reference, str):
            address = _joined(base, reference)
            resource, _, fragment = address.partition("#")
            if (document, resource) not in self._known:
                return self._elsewhere.setdefault(address, {ELSEWHERE: reference})
            if fragment and not fragment.startswith("/"):
                found = self._known.get((document, address))
            else:
                found = self._known[document, resource]
                for name in unquote(fragment).split("/")[1:]:
                    found = _member(found, name.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping) and id(found) not in self._places:
                self._index(found, document, resource)  # below a keyword that holds no schemas
            if isinstance(found, Mapping | bool):
                return found
        raise ConfigError(f"$ref {reference!r} points to nothing in the schema")

    def _index(self, schema: Any, document: int, base: str) -> None:
        if not isinstance(schema, Mapping):
            return
        if DOCUMENT in schema:
            document, base = id(schema), ""
            self._known[document, ""] = schema
        if isinstance(schema.get("$id"), str):
            address = _joined(base, schema["$id"].removesuffix("#"))
            self._known[document, address] = schema
            base = base if "#" in address else address
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._known[document, f"{base}#{schema[keyword]}"] = schema
        self._places[id(schema)] = document, base
        for member in _members(schema):
            self._index(member, document, base)


def _members(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas directly below a schema."""
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif keyword in DIRECT:
            yield from value if isinstance(value, list) else (value,)


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + ("" if reference == "#" else reference)
    return urljoin(base, reference)


def _member(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
    return schema.get(name) if isinstance(schema, Mapping) else None
