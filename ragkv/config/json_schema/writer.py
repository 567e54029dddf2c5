"""JSON schemas as llguidance takes them.

An object is closed, i.e. has no properties that its schema does not name, if its schema has
``properties`` and no keyword for other properties (``additionalProperties``,
``patternProperties``, ``propertyNames``, ``unevaluatedProperties``). Its schema includes ``$ref``,
``allOf``, and the chosen branches of ``anyOf`` and ``oneOf``. So such a schema is read as if it had
``"unevaluatedProperties": false``; ``dict[str, int]`` and pydantic's ``extra="allow"`` are open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.config.json_schema.alternatives import (
    CONSTRAINTS,
    COPIED,
    DOCUMENT,
    FALSE,
    UNEVALUATED,
    UNKNOWN,
    Alternative,
    Alternatives,
    Schema,
    SchemaPart,
    listed,
)
from ragkv.config.json_schema.grammar import (
    FORMATS,
    KNOWN,
    are_disjoint,
    is_supported,
    pattern_of,
    patterns_of,
)
from ragkv.errors import ConfigError

_MORE_ITEMS = UNKNOWN | {"contains", "if", "then", "else"}
"""Keywords that can apply to items that a part does not name."""

_ANY_VALUE: tuple[Any, ...] = (True, {})
_Named = tuple[dict[str, bool], dict[str, bool]]
"""Names and patterns of properties."""


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A place in a schema, or a keyword there.

    Attributes
    ----------
    document
        The name of the embedded document, e.g. of a tool; empty for the outer one.
    place
        The path of properties.
    strict
        Whether the document has ``"strict": true``.
    """

    document: str
    place: str
    strict: bool
    keyword: str = ""

    def __add__(self, step: str) -> SchemaPlace:
        return replace(self, place=(self.place + step).lstrip("."))


class SchemaWriter:
    """Writes a schema for llguidance and records in ``ignored`` the keywords that it leaves out.

    Parameters
    ----------
    document
        The JSON schema. Do not change it afterwards.
    without
        Keywords to leave out everywhere.
    """

    def __init__(self, document: Schema, without: frozenset[str] = frozenset()) -> None:
        self.ignored: dict[SchemaPlace, None] = {}
        self._document = document
        self._read = Alternatives(document)
        self._without = without
        self._names: dict[int, str] = {}
        self._written: dict[int, Any] = {}
        self._one_of: list[tuple[SchemaPlace, list[list[Any]]]] = []

    def write(self) -> dict[str, Any]:
        """Return the whole schema.

        Raises
        ------
        ConfigError
            It is not a schema.
        """
        place = SchemaPlace("", "", self._document.get("strict") is True)
        written = self._schema(self._document, place)
        definitions = {name: self._written[key] for key, name in self._names.items()}
        for one_of, branches in self._one_of:
            if not are_disjoint(branches, definitions):
                self._ignore(one_of, "oneOf")
        return {**written, "$defs": definitions} if definitions else written

    def _ignore(self, place: SchemaPlace, keyword: str) -> None:
        self.ignored[replace(place, keyword=keyword)] = None

    def _schema(self, given: Any, place: SchemaPlace) -> Any:
        """Return a schema, or a reference to its definition where it is referred to."""
        if isinstance(given, bool):
            return given
        target = self._read.referred(given)
        key = id(target)
        if key not in self._written:
            self._written[key] = None
            if isinstance(target, Mapping) and DOCUMENT in target:
                place = SchemaPlace(str(target[DOCUMENT]), "", target.get("strict") is True)
            self._written[key] = self._union(target, place)
            if target is given and key not in self._names:
                return self._written[key]
        name = self._names.setdefault(key, f"d{len(self._names)}")
        return {"$ref": f"#/$defs/{name}"}

    def _union(self, given: Any, place: SchemaPlace) -> dict[str, Any]:
        """Return a schema as the union of its alternatives."""
        constraints = given.keys() & CONSTRAINTS if isinstance(given, Mapping) else set()
        if constraints in ({"anyOf"}, {"oneOf"}) and "discriminator" not in given:
            (keyword,) = constraints
            written = [self._schema(each, place) for each in listed(given, keyword)]
            found = [Alternative((), {(keyword, 0): index}) for index in range(len(written))]
        else:
            found = self._read.of(given)
            written = [self._alternative(each, found, given, place) for each in found]
        compared = written
        if isinstance(given, Mapping) and UNEVALUATED & given.keys():  # they apply after oneOf
            opened = {**given, **dict.fromkeys(UNEVALUATED, True)}
            compared = [self._alternative(each, found, opened, place) for each in found]
        unions: dict[int, dict[int, list[Any]]] = {}
        for alternative, schema in zip(found, compared, strict=True):
            for (keyword, union), index in alternative.branches.items():
                if keyword == "oneOf":
                    unions.setdefault(union, {}).setdefault(index, []).append(schema)
        self._one_of += [(place, list(branches.values())) for branches in unions.values()]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _alternative(
        self,
        alternative: Alternative,
        others: Sequence[Alternative],
        given: Any,
        place: SchemaPlace,
    ) -> Any:
        """Return the conjunction of an alternative's parts and of ``given``'s remaining values."""
        parts: Sequence[SchemaPart] = alternative.parts
        enforced = [part.keywords for part in parts if part.enforced]
        stated = given if isinstance(given, Mapping) else {}
        out = [each for part in enforced for each in self._part(part, place)]
        closes = any(part.closes and "properties" in part.keywords for part in parts)
        if stated.get("unevaluatedProperties", True) not in _ANY_VALUE:
            several = any(keyword == "anyOf" for keyword, _ in alternative.branches)
            if several:  # a second branch can hold and name properties
                parts = [part for each in others for part in each.parts]
            if several or any("if" in part for part in enforced):
                self._ignore(place, "unevaluatedProperties")
            rest = self._schema(stated["unevaluatedProperties"], place + ".*")
            self._close(out, _named(parts, stated=True), rest, place)
        elif closes and "unevaluatedProperties" not in stated:
            self._close(out, _named(parts, stated=False), False, place)
        if stated.get("unevaluatedItems", True) not in _ANY_VALUE:
            out += self._unevaluated_items(stated, enforced, len(others), place)
        return _conjunction(out, of_object=closes)

    def _close(
        self, out: list[dict[str, Any]], named: _Named | None, rest: Any, place: SchemaPlace
    ) -> None:
        """Give properties that are not named the schema ``rest``."""
        if named is None:
            return
        names, patterns = named
        if not _are_usable(patterns):
            self._ignore(place, "unevaluatedProperties")
        elif len(out) == 1 and out[0].get("patternProperties", {}).keys() == patterns.keys():
            out[0]["properties"] = {**names, **out[0].get("properties", {})}
            out[0]["additionalProperties"] = rest
        else:
            closing = {"properties": names, "additionalProperties": rest}
            out.insert(0, {**closing, "patternProperties": patterns} if patterns else closing)

    def _unevaluated_items(
        self, given: Schema, parts: Sequence[Schema], alternatives: int, place: SchemaPlace
    ) -> Iterator[dict[str, Any]]:
        if alternatives > 1 or any(_MORE_ITEMS & part.keys() for part in parts):
            self._ignore(place, "unevaluatedItems")
        elif not any("items" in part or "unevaluatedItems" in part for part in parts):
            first = max((len(part.get("prefixItems") or ()) for part in parts), default=0)
            items = self._schema(given["unevaluatedItems"], place + "[]")
            yield {"prefixItems": [True] * first, "items": items}

    def _part(self, part: Schema, place: SchemaPlace) -> list[dict[str, Any]]:
        """Return the keywords of a part as schemas that hold together."""
        if UNEVALUATED & part.keys():
            return [self._schema(part, place)]
        left_out = sorted(self._without & part.keys())
        part = {name: value for name, value in part.items() if name not in self._without}
        out = {name: _whole(part[name]) for name in COPIED if name in part}
        self._arrays(part, out, place)
        self._objects(part, out, place)
        for keyword in (*left_out, *_unenforced(part)):
            self._ignore(place, keyword)
        never = [dict(FALSE)] if part.get("not") in _ANY_VALUE else []
        strings, names = self._strings(part, place), self._property_names(part, place)
        return [out, *strings, *names, *never]

    def _strings(self, part: Schema, place: SchemaPlace) -> Iterator[dict[str, Any]]:
        form, pattern = part.get("format"), part.get("pattern")
        if form in FORMATS:
            yield {"pattern": pattern_of(form)}
        elif form in KNOWN:
            yield {"format": form}
        elif form is not None:
            self._ignore(place, f"format {form!r}")
        if form == "hostname":
            yield {"maxLength": 253}
        if pattern is None:
            return
        found = patterns_of(pattern) if isinstance(pattern, str) else [pattern]
        if all(is_supported({"type": "string", "pattern": each}) for each in found):
            yield from ({"pattern": each} for each in found)
        else:
            self._ignore(place, "pattern")

    def _arrays(self, part: Schema, out: dict[str, Any], place: SchemaPlace) -> None:
        items, prefix = part.get("items"), part.get("prefixItems")
        if isinstance(items, list):  # the form before 2020-12
            items, prefix = part.get("additionalItems"), items
        if isinstance(prefix, list):
            out["prefixItems"] = [self._schema(p, place + f"[{n}]") for n, p in enumerate(prefix)]
        if items is not None:
            out["items"] = self._schema(items, place + "[]")

    def _objects(self, part: Schema, out: dict[str, Any], place: SchemaPlace) -> None:
        for keyword in ("properties", "patternProperties"):
            given = part.get(keyword)
            if given is None:
                continue
            if not isinstance(given, Mapping):
                raise ConfigError(f"{keyword} must be schemas by name, not {given!r}")
            if keyword == "patternProperties" and not _are_usable(given):
                self._ignore(place, keyword)
                return
            out[keyword] = {n: self._schema(each, place + f".{n}") for n, each in given.items()}
        if "additionalProperties" in part:
            out["additionalProperties"] = self._schema(part["additionalProperties"], place + ".*")

    def _property_names(self, part: Schema, place: SchemaPlace) -> Iterator[dict[str, Any]]:
        """Yield ``propertyNames`` as the possible properties or as a pattern."""
        if part.get("propertyNames", True) in _ANY_VALUE:
            return
        found = self._read.of(part["propertyNames"])
        parts = found[0].parts if len(found) == 1 else ()
        schema = _with_names(parts[0].keywords) if len(parts) == 1 else None
        patterns = (schema or {}).get("patternProperties", {})
        twice = patterns and "patternProperties" in part
        if schema is None or twice or not _are_usable(patterns):
            self._ignore(place, "propertyNames")
        else:
            yield schema


def _with_names(names: Schema) -> dict[str, Any] | None:
    """Return the schema of objects whose property names satisfy keywords; None if not supported."""
    keywords = names.keys() - {"type"}
    pattern = names.get("pattern", pattern_of(names.get("format")))
    values = names.get("enum", [names.get("const")])
    if names.get("type", "string") != "string" or not keywords:
        return None
    if keywords <= {"minLength", "maxLength"}:
        least, most = _whole(names.get("minLength", 0)), _whole(names.get("maxLength", ""))
        pattern = rf"^[\s\S]{{{least},{most}}}$"
    elif len(keywords) > 1:
        return None
    by_pattern = isinstance(pattern, str)
    keyword, allowed = ("patternProperties", [pattern]) if by_pattern else ("properties", values)
    if not all(isinstance(each, str) for each in allowed):
        return None
    return {keyword: dict.fromkeys(allowed, True), "additionalProperties": False}


def _conjunction(parts: Sequence[dict[str, Any]], *, of_object: bool) -> dict[str, Any]:
    """Return the conjunction of schemas, each with the type that one of them requires.

    Without a type, llguidance expands a schema into one for each type, and its number of schemas
    is limited.
    """
    typed = next((part["type"] for part in parts if "type" in part), None)
    if typed is None and of_object and not any({"enum", "const"} & part.keys() for part in parts):
        typed = "object"
    kinds = {} if typed is None else {"type": typed}
    out = [{**kinds, **part} for part in parts if part] or [kinds]
    return out[0] if len(out) == 1 else {"allOf": out}


def _unenforced(part: Schema) -> Iterator[str]:
    """Yield the keywords of a part that have an effect and cannot be enforced."""
    yield from (f"{keyword} {part[keyword]!r}" for keyword in UNKNOWN & part.keys())
    if part.get("not", False) not in (False, *_ANY_VALUE):
        yield "not"
    if part.get("uniqueItems", False) is not False:
        yield "uniqueItems"
    if "if" in part and ("then" in part or "else" in part):
        yield "if"
    if "contains" in part and (part.get("minContains") != 0 or "maxContains" in part):
        yield "contains"


def _named(parts: Sequence[SchemaPart], *, stated: bool) -> _Named | None:
    """Return the names and patterns of properties in parts; None if one mentions all properties.

    Parameters
    ----------
    stated
        Whether ``unevaluatedProperties`` is stated, which ignores names that are only required.
    """
    names: dict[str, bool] = {}
    patterns: dict[str, bool] = {}
    for part in parts:
        keywords = part.keywords
        own = dict.fromkeys(keywords.get("properties") or (), True)
        matched = dict.fromkeys(keywords.get("patternProperties") or (), True)
        others = bool((UNEVALUATED | UNKNOWN | {"additionalProperties"}) & keywords.keys())
        if not stated:
            own |= dict.fromkeys(keywords.get("required") or (), True)
            least = keywords.get("minProperties")
            others |= bool(matched) or "propertyNames" in keywords
            others |= isinstance(least, int) and least > len(own) > 0
        if others:
            return None
        names |= own
        patterns |= matched
    return names, patterns


def _are_usable(patterns: Mapping[str, Any]) -> bool:
    """Return whether llguidance can tell apart the names that patterns match."""
    names = dict.fromkeys(patterns, True)
    return not patterns or is_supported({"type": "object", "patternProperties": names})


def _whole(number: Any) -> Any:
    """Return ``2`` for ``2.0``, which is the same number in JSON Schema."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
