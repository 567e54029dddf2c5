"""What a ``$ref`` of a JSON schema points to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from ragkv.errors import ConfigError

NAMED = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords whose members are schemas by name."""

LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose members are schemas in a list."""

SINGLE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""

DOCUMENT = "x-document"
"""Keyword of a schema inside another that is a document of its own: its references point into it,
and its ``strict`` is its own. The value names it in messages."""

ELSEWHERE = "$ref to another document"
"""Keyword of what stands for a schema that is not known."""


def members(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that stand directly in a schema."""
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif keyword in LISTED and isinstance(value, list):
            yield from value
        elif keyword in SINGLE:
            yield value


class References:
    """The schemas of a document by their addresses: ``$id``, ``$anchor``, JSON pointers.

    Parameters
    ----------
    document
        A JSON schema. It must stay as it is.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._known: dict[tuple[int, str], Any] = {}
        self._places: dict[int, tuple[int, str]] = {}
        self._elsewhere: dict[str, Any] = {}
        self._documents = 0
        self._index(document, (0, ""))
        self._known[0, ""] = document

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a schema's ``$ref`` points to.

        One to another document gives a schema with nothing but :data:`ELSEWHERE`.

        Raises
        ------
        ConfigError
            There is none.
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
                found = self._known.get((document, resource))
                for name in unquote(fragment).split("/")[1:]:
                    found = _member(found, name.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping) and id(found) not in self._places:
                self._index(found, (document, resource))  # in a place where no schema is looked for
            if isinstance(found, Mapping | bool):
                return found
        raise ConfigError(f"$ref {reference!r} points to nothing in the schema")

    def _index(self, schema: Any, place: tuple[int, str]) -> None:
        if not isinstance(schema, Mapping):
            return
        document, base = place
        if DOCUMENT in schema:
            self._documents += 1
            document, base = self._documents, ""
            self._known[document, ""] = schema
        named = schema.get("$id")
        if isinstance(named, str):
            address = _joined(base, named.removesuffix("#"))
            self._known[document, address] = schema
            base = base if "#" in named.removesuffix("#") else address
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._known[document, f"{base}#{schema[keyword]}"] = schema
        self._places[id(schema)] = document, base
        for member in members(schema):
            self._index(member, (document, base))


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + ("" if reference == "#" else reference)
    return urljoin(base, reference)


def _member(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
    return schema.get(name) if isinstance(schema, Mapping) else None
