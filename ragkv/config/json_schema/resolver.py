"""JSON schemas as llguidance can follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ragkv.config.json_schema import keywords
from ragkv.config.json_schema.closing import NamedProperties, named_by, named_in
from ragkv.config.json_schema.disjoint import all_disjoint
from ragkv.config.json_schema.parts import FALSE, UNKNOWN, Schema, SchemaParts, Union, unions_of
from ragkv.config.json_schema.references import DOCUMENT

MOST_DEPENDENCIES = 6
"""Dependencies of an object's properties that are followed; each may double the grammar."""

_MORE_ITEMS = UNKNOWN | {"contains", "if", "then", "else"}
"""Keywords that may say something of items that a part does not name."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A keyword that is not followed.

    Attributes
    ----------
    document
        What the schema is of, where it stands in another: a tool.
    place
        The path of properties to it.
    strict
        Whether the document says ``"strict": true``.
    """

    document: str
    place: str
    keyword: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Around:
    """What is said of an object's properties around a branch of a union.

    Attributes
    ----------
    rest
        The schema of properties that nothing names: a boolean, or the name of a definition.
    stated
        Whether that is ``unevaluatedProperties``, and not the rule.
    closing
        Whether there are ``properties``, so that the rule closes the object.
    """

    named: NamedProperties
    rest: bool | str
    stated: bool = False
    closing: bool = False


OPEN = Around(NamedProperties(), rest=True)
ALONE = Around(NamedProperties(), rest=False)


@dataclass(slots=True)
class Resolver:
    """Writes a schema for llguidance.

    Its references point to ``$defs`` of its own, every object says what else it may have, and
    what cannot be followed is left out and noted.

    Parameters
    ----------
    parts
        Reads the document.
    closed
        Whether objects are closed by the rule of :mod:`ragkv.config.json_schema.closing`.
    without
        Keywords to leave out everywhere.
    """

    parts: SchemaParts
    closed: bool = True
    without: frozenset[str] = frozenset()
    definitions: dict[str, Any] = field(default_factory=dict)
    ignored: dict[Ignored, None] = field(default_factory=dict)
    _names: dict[Any, str] = field(default_factory=dict)
    _begun: set[Any] = field(default_factory=set)
    _one_of: list[tuple[Ignored, list[Any]]] = field(default_factory=list)
    _document: str = ""
    _strict: bool = False

    def resolve(self, document: Schema) -> dict[str, Any]:
        """Return the whole schema."""
        self._strict = document.get("strict") is True
        written = self.schema(document, "")
        written = {} if written is True else dict(FALSE) if written is False else dict(written)
        for unless_disjoint, branches in self._one_of:
            if unless_disjoint not in self.ignored and not all_disjoint(branches, self.definitions):
                self.ignored[unless_disjoint] = None
        return {**written, "$defs": self.definitions} if self.definitions else written

    def ignore(self, place: str, keyword: str) -> None:
        """Note that a keyword is not followed at a place."""
        self.ignored[self._ignored(place, keyword)] = None

    def _ignored(self, place: str, keyword: str) -> Ignored:
        return Ignored(self._document, place.lstrip("."), keyword, self._strict)

    def schema(
        self,
        given: Any,
        place: str,
        around: Around | None = None,
        discriminator: str | None = None,
    ) -> Any:
        """Return what stands for a schema: itself, or a reference to a definition.

        Parameters
        ----------
        place
            The path of properties to it.
        around
            What is said around a branch of a union.
        discriminator
            A property that a branch must have.
        """
        if isinstance(given, bool) and around is None:
            return given
        target = self.parts.referred(given)
        given = given if target is None else target
        key = id(given), around, discriminator
        if key in self._begun:
            self._names.setdefault(key, f"d{len(self._names)}")
        elif key not in self._names:
            self._begun.add(key)
            outer = self._document, self._strict
            if isinstance(given, Mapping) and DOCUMENT in given:
                self._document, self._strict = str(given[DOCUMENT]), given.get("strict") is True
                place = ""
            written = self._written(given, place, around, discriminator)
            self._document, self._strict = outer
            self._begun.discard(key)
            if target is None and key not in self._names:
                return written
            name = self._names.setdefault(key, f"d{len(self._names)}")
            self.definitions[name] = written
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _written(
        self, given: Any, place: str, around: Around | None, discriminator: str | None
    ) -> dict[str, Any]:
        parts = self.parts.of(given)
        if discriminator is not None:
            parts.append({"required": [discriminator]})
        if "allOf" in self.without:
            parts = self._overridden(parts, given, place)
        around = self._around(given, parts, place, around)
        unions = [union for part in parts for union in self._unions(part, place)]
        out = [each for part in parts for each in self._part(part, place)]
        inner = [named_in(union.branches, self.parts, stated=around.stated) for union in unions]
        if around.closing and all(around.named >= each for each in inner):
            self._close(out, around, place)
            around = OPEN
        if isinstance(given, Mapping) and given.get("unevaluatedItems", True) not in (True, {}):
            out += self._other_items(given["unevaluatedItems"], parts, unions, place)
        typed = any({"type", "enum", "const"} & part.keys() for part in parts)
        if self.closed and not typed and not unions and any("properties" in part for part in parts):
            out[0]["type"] = "object"
        for index, union in enumerate(unions):
            outside = around
            for each in inner[:index] + inner[index + 1 :]:
                outside = replace(outside, named=outside.named | each)
            if around.rest is True or outside.named.others:
                outside = OPEN
            if union.keyword in {"anyOf", "oneOf"}:
                out.append(self._union(union, place, None if outside == ALONE else outside))
            else:
                out.append(self._union(union, place, OPEN if outside == ALONE else outside))
        out = [each for each in out if each]
        return out[0] if len(out) == 1 else {"allOf": out} if out else {}

    def _overridden(self, parts: list[Schema], given: Any, place: str) -> list[Schema]:
        """Return parts that name each property once: the most derived says what it is."""
        own = given.get("properties") if isinstance(given, Mapping) else None
        last: dict[str, Any] = {}
        for part in parts:
            last |= part.get("properties") or {}
        last |= own or {}
        out = []
        for part in parts:
            named = part.get("properties") or {}
            kept = {name: each for name, each in named.items() if last.get(name) is each}
            for name in named.keys() - kept.keys():
                self.ignore(f"{place}.{name}", "allOf")
            out.append({**part, "properties": kept} if kept != named else part)
        return out

    def _around(self, given: Any, parts: list[Schema], place: str, around: Around | None) -> Around:
        """Return what is said of the object's properties, all of its unions aside."""
        stated = isinstance(given, Mapping) and "unevaluatedProperties" in given
        if stated:
            rest = self._definition(given["unevaluatedProperties"], f"{place}.*")
            around = Around(NamedProperties(), rest, stated=True, closing=True)
        elif around is None:
            around = ALONE if self.closed else OPEN
        if around.rest is True:
            return OPEN
        named = around.named
        for part in parts:
            named |= named_by(part, self.parts, stated=around.stated)
            if stated and "if" in part:
                self.ignore(place, "if")
            for union in unions_of(part) if stated else ():
                if union.keyword == "anyOf":  # more than one may hold, and name properties
                    self.ignore(place, "unevaluatedProperties")
                    named |= named_in(union.branches, self.parts, stated=stated)
        closing = around.closing or any("properties" in part for part in parts)
        return OPEN if named.others else replace(around, named=named, closing=closing)

    def _definition(self, given: Any, place: str) -> bool | str:
        written = self.schema(given, place)
        if isinstance(written, bool) or not written:
            return written is not False
        name = self._names.setdefault((id(given), "rest"), f"d{len(self._names)}")
        self.definitions[name] = written
        return name

    def _close(self, out: list[dict[str, Any]], around: Around, place: str) -> None:
        patterns = dict.fromkeys(around.named.patterns, True)
        if not keywords.are_usable(patterns):
            self.ignore(place, "unevaluatedProperties")
            return
        rest = around.rest
        written = {"$ref": f"#/$defs/{rest}"} if isinstance(rest, str) else rest
        names = dict.fromkeys(around.named.names, True)
        if len(out) == 1 and out[0].get("patternProperties", {}).keys() == patterns.keys():
            known = out[0].get("properties", {})
            out[0]["properties"] = {**known, **{n: True for n in names if n not in known}}
            out[0]["additionalProperties"] = written
            return
        closing: dict[str, Any] = {"properties": names, "additionalProperties": written}
        out.insert(0, {**closing, "patternProperties": patterns} if patterns else closing)

    def _union(self, union: Union, place: str, around: Around | None) -> dict[str, Any]:
        branches = [
            self.schema(each, place, around, union.discriminator) for each in union.branches
        ]
        if union.keyword == "oneOf":
            self._one_of.append((self._ignored(place, "oneOf"), branches))
        return {"anyOf": branches}

    def _unions(self, part: Schema, place: str) -> list[Union]:
        unions = [each for each in unions_of(part) if each.keyword not in self.without]
        depending = [each for each in unions if each.keyword not in {"anyOf", "oneOf"}]
        if len(depending) > MOST_DEPENDENCIES:
            self.ignore(place, depending[0].keyword)
            unions = [each for each in unions if each not in depending]
        return unions

    def _part(self, part: Schema, place: str) -> list[dict[str, Any]]:
        if "unevaluatedProperties" in part or "unevaluatedItems" in part:
            return [self.schema(part, place)]
        for keyword in sorted(self.without & part.keys()):
            self.ignore(place, keyword)
        left = {name: value for name, value in part.items() if name not in self.without}
        return keywords.written(left, place, self)

    def _other_items(
        self, given: Any, parts: list[Schema], unions: list[Union], place: str
    ) -> list[dict[str, Any]]:
        """Return ``unevaluatedItems`` as the items behind those that are named."""
        several = any(union.keyword in {"anyOf", "oneOf"} for union in unions)
        if several or any(_MORE_ITEMS & part.keys() for part in parts):
            self.ignore(place, "unevaluatedItems")
            return []
        if any("items" in part or "unevaluatedItems" in part for part in parts):
            return []
        first = max((len(part.get("prefixItems") or ()) for part in parts), default=0)
        return [{"prefixItems": [True] * first, "items": self.schema(given, f"{place}[]")}]
