"""The targets of ``$ref`` in a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from ragkv.errors import ConfigError

NAMED = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    }
)
"""Keywords whose members are schemas by name."""

DIRECT = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("prefixItems", "items", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    }
)
"""Keywords whose value is a schema or a list of schemas."""

DOCUMENT = "x-document"
"""Keyword of an embedded schema that is a document of its own: its references point into it, and
its ``strict`` applies to it only. Messages name the document by the keyword's value."""

ELSEWHERE = "$ref to another document"
"""Keyword that stands for a schema of another document."""


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
