"""JSON schemas as llguidance takes them.

Which objects are closed, i.e. have the properties that their schema names and no others: an object
whose schema has ``properties`` and no keyword for other properties. Its schema includes ``$ref``,
``allOf``, and the chosen branches of ``anyOf`` and ``oneOf``. A schema that mentions other
properties (``additionalProperties``, ``patternProperties``, ``propertyNames``,
``unevaluatedProperties``) or names none is written as it is: ``dict[str, int]`` and pydantic's
``extra="allow"`` are open. So every schema with ``properties`` is read as if it had
``"unevaluatedProperties": false``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ragkv.config.json_schema.alternatives import (
    CONSTRAINTS,
    DEPENDENT,
    FALSE,
    UNEVALUATED,
    UNKNOWN,
    Alternative,
    Alternatives,
    Schema,
    SchemaPart,
    listed,
)
from ragkv.config.json_schema.formats import FORMATS, KNOWN, LONGEST, patterns_of
from ragkv.config.json_schema.grammar import all_disjoint, problem_of_part
from ragkv.config.json_schema.references import DOCUMENT
from ragkv.errors import ConfigError

_AS_THEY_ARE = (
    *("type", "enum", "const", "required", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MORE_ITEMS = UNKNOWN | {"contains", "if", "then", "else"}
"""Keywords that can apply to items that a part does not name."""

_TYPES = frozenset({"type", "enum", "const"})
_LENGTHS = frozenset({"minLength", "maxLength"})

Named = tuple[dict[str, bool], dict[str, bool]]
"""Names and patterns of properties, in the order of the document."""


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
    """Writes a schema for llguidance.

    References are replaced by ones to ``$defs``, closed objects say so, and keywords that cannot be
    enforced are left out and noted.

    Parameters
    ----------
    document
        The JSON schema. Do not change it afterwards.
    closed
        Whether objects are closed by the rule of this module.
    without
        Keywords to leave out everywhere.
    """

    def __init__(
        self, document: Schema, *, closed: bool = True, without: frozenset[str] = frozenset()
    ) -> None:
        self.ignored: dict[SchemaPlace, None] = {}
        self._read = Alternatives(document)
        self._closed = closed
        self._without = without
        self._definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._written: dict[int, Any] = {}
        self._copies: list[SchemaPart] = []  # kept, because schemas are known by their identity
        self._one_of: list[tuple[SchemaPlace, list[Any], list[tuple[int, int]]]] = []
        self._document = document

    def write(self) -> dict[str, Any]:
        """Return the whole schema.

        Raises
        ------
        ConfigError
            It is not a schema.
        """
        place = SchemaPlace("", "", self._document.get("strict") is True)
        written = self._schema(self._document, place)
        for one_of, alternatives, pairs in self._one_of:
            if not all_disjoint(alternatives, pairs, self._definitions):
                self.ignored[one_of] = None
        return {**written, "$defs": self._definitions} if self._definitions else written

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
            self._written[key] = self._alternatives(target, place)
            if target is given and key not in self._names:
                return self._written[key]
        name = self._names.setdefault(key, f"d{len(self._names)}")
        self._definitions[name] = self._written[key]
        return {"$ref": f"#/$defs/{name}"}

    def _alternatives(self, given: Any, place: SchemaPlace) -> dict[str, Any]:
        constraints = given.keys() & CONSTRAINTS if isinstance(given, Mapping) else set()
        if constraints in ({"anyOf"}, {"oneOf"}) and "discriminator" not in given:
            (union,) = constraints
            written = [self._schema(each, place) for each in listed(given, union)]
            found = [Alternative((), {0: (union, index)}) for index in range(len(written))]
        else:
            found = self._read.of(given)
            written = [self._alternative(each, found, given, place) for each in found]
        if any(keyword == "oneOf" for each in found for keyword, _ in each.branches.values()):
            every = combinations(range(len(found)), 2)
            pairs = [(one, other) for one, other in every if found[one].excludes(found[other])]
            self._one_of.append((replace(place, keyword="oneOf"), written, pairs))
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _alternative(
        self,
        alternative: Alternative,
        others: Sequence[Alternative],
        given: Any,
        place: SchemaPlace,
    ) -> Any:
        parts: Sequence[SchemaPart] = alternative.parts
        if "allOf" in self._without:
            parts = self._overridden(parts, given, place)
        enforced = [part.keywords for part in parts if part.enforced]
        out = [each for part in enforced for each in self._part(part, place)]
        stated = isinstance(given, Mapping) and "unevaluatedProperties" in given
        closes = any(part.closes and "properties" in part.keywords for part in parts)
        rest = self._schema(given["unevaluatedProperties"], place + ".*") if stated else False
        if stated and rest not in (True, {}):
            several = "anyOf" in {keyword for keyword, _ in alternative.branches.values()}
            if several:  # a second branch can hold, and name properties
                parts = [part for each in others for part in each.parts]
            if several or any("if" in part for part in enforced):
                self._ignore(place, "unevaluatedProperties")
            self._close(out, _named(parts, stated=True), rest, place)
        elif closes and self._closed and not stated:
            self._close(out, _named(parts, stated=False), False, place)
        if isinstance(given, Mapping) and given.get("unevaluatedItems", True) not in (True, {}):
            if len(others) > 1 or any(_MORE_ITEMS & part.keys() for part in enforced):
                self._ignore(place, "unevaluatedItems")
            elif not any("items" in part or "unevaluatedItems" in part for part in enforced):
                first = max((len(part.get("prefixItems") or ()) for part in enforced), default=0)
                items = self._schema(given["unevaluatedItems"], place + "[]")
                out.append({"prefixItems": [True] * first, "items": items})
        if closes and self._closed and not any(_TYPES & part.keys() for part in enforced):
            out[0] = {"type": "object", **out[0]}
        out = [each for each in out if each]
        return out[0] if len(out) == 1 else {"allOf": out} if out else {}

    def _overridden(
        self, parts: Sequence[SchemaPart], given: Any, place: SchemaPlace
    ) -> list[SchemaPart]:
        """Return parts that name each property once: the most derived class defines it."""
        last: dict[str, Any] = {}
        for part in parts:
            last |= (part.keywords.get("properties") or {}) if part.closes else {}
        last |= given.get("properties") or {}
        out = []
        for part in parts:
            copied = part.closes and "$ref" not in part.keywords
            named = (part.keywords.get("properties") or {}) if copied else {}
            kept = {name: each for name, each in named.items() if last[name] is each}
            for name in named.keys() - kept.keys():
                self._ignore(place + f".{name}", "allOf")
            keywords = {**part.keywords, "properties": kept}
            out.append(replace(part, keywords=keywords) if kept != named else part)
        self._copies += out
        return out

    def _close(
        self, out: list[dict[str, Any]], named: Named | None, rest: Any, place: SchemaPlace
    ) -> None:
        """Give properties that no part names the schema ``rest``."""
        if named is None:
            return
        names, patterns = named
        if not _are_usable(patterns):
            self._ignore(place, "unevaluatedProperties")
        elif len(out) == 1 and out[0].get("patternProperties", {}).keys() == patterns.keys():
            properties = out[0].get("properties", {})
            unknown = {name: True for name in names if name not in properties}
            out[0]["properties"] = {**properties, **unknown}
            out[0]["additionalProperties"] = rest
        else:
            closing = {"properties": names, "additionalProperties": rest}
            out.insert(0, {**closing, "patternProperties": patterns} if patterns else closing)

    def _part(self, part: Schema, place: SchemaPlace) -> list[dict[str, Any]]:
        """Return the keywords of a part as schemas that hold together."""
        if UNEVALUATED & part.keys():
            return [self._schema(part, place)]
        for keyword in sorted(self._without & part.keys()):
            self._ignore(place, keyword)
        part = {name: value for name, value in part.items() if name not in self._without}
        out = {name: part[name] for name in _AS_THEY_ARE if name in part}
        out |= {name: _whole(part[name]) for name in _COUNTS if name in part}
        further = list(self._strings(part, out, place))
        self._arrays(part, out, place)
        self._objects(part, out, place)
        further += self._property_names(part, place)
        for keyword in UNKNOWN & part.keys():
            self._ignore(place, f"{keyword} {part[keyword]!r}")
        for keyword in part.keys() & DEPENDENT:
            self._ignore(place, keyword)
        if part.get("not") in (True, {}):
            further.append(dict(FALSE))
        elif part.get("not", False) is not False:
            self._ignore(place, "not")
        if part.get("uniqueItems", False) is not False:
            self._ignore(place, "uniqueItems")
        if "if" in part and ("then" in part or "else" in part):
            self._ignore(place, "if")
        return [out, *further]

    def _strings(
        self, part: Schema, out: dict[str, Any], place: SchemaPlace
    ) -> Iterator[dict[str, Any]]:
        """Write ``pattern`` and ``format``, and yield further patterns."""
        patterns = []
        form: Any = part.get("format")
        pattern = part.get("pattern")
        if form in FORMATS:
            patterns.append(f"^(?:{FORMATS[form]})$")
            if form in LONGEST:
                yield {"maxLength": LONGEST[form]}
        elif form in KNOWN:
            out["format"] = form
        elif form is not None:
            self._ignore(place, f"format {form!r}")
        if pattern is not None:
            found = patterns_of(pattern) if isinstance(pattern, str) else [pattern]
            parts = [{"type": "string", "pattern": each} for each in found]
            if any(problem_of_part(json.dumps(each)) for each in parts):
                self._ignore(place, "pattern")
            else:
                patterns += found
        if patterns:
            out["pattern"] = patterns[0]
        yield from ({"pattern": each} for each in patterns[1:])

    def _arrays(self, part: Schema, out: dict[str, Any], place: SchemaPlace) -> None:
        items, prefix = part.get("items"), part.get("prefixItems")
        if isinstance(items, list):  # the form before 2020-12
            items, prefix = part.get("additionalItems"), items
        if isinstance(prefix, list):
            out["prefixItems"] = [
                self._schema(each, place + f"[{index}]") for index, each in enumerate(prefix)
            ]
        if items is not None:
            out["items"] = self._schema(items, place + "[]")
        if "contains" in part and (part.get("minContains") != 0 or "maxContains" in part):
            self._ignore(place, "contains")

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
            out[keyword] = {
                name: self._schema(each, place + f".{name}") for name, each in given.items()
            }
        if "additionalProperties" in part:
            out["additionalProperties"] = self._schema(part["additionalProperties"], place + ".*")

    def _property_names(self, part: Schema, place: SchemaPlace) -> Iterator[dict[str, Any]]:
        """Yield ``propertyNames`` as the possible properties, or as their pattern."""
        if part.get("propertyNames", True) in (True, {}):
            return
        found = self._read.of(part["propertyNames"])
        parts = found[0].parts if len(found) == 1 else ()
        names = parts[0].keywords if len(parts) == 1 else {}
        keywords = names.keys() - {"type"} if names.get("type", "string") == "string" else set()
        values = names.get("enum", [names.get("const")])
        pattern = names.get("pattern")
        if keywords == {"format"}:
            pattern = FORMATS.get(names["format"]) and f"^(?:{FORMATS[names['format']]})$"
        elif keywords and keywords <= _LENGTHS:
            least, most = _whole(names.get("minLength", 0)), _whole(names.get("maxLength", ""))
            pattern = rf"^[\s\S]{{{least},{most}}}$"
        elif keywords != {"pattern"}:
            pattern = None
        if keywords in ({"enum"}, {"const"}) and all(isinstance(each, str) for each in values):
            yield {"properties": dict.fromkeys(values, True), "additionalProperties": False}
        elif (
            isinstance(pattern, str)
            and "patternProperties" not in part
            and _are_usable({pattern: True})
        ):
            yield {"patternProperties": {pattern: True}, "additionalProperties": False}
        else:
            self._ignore(place, "propertyNames")


def _named(parts: Sequence[SchemaPart], *, stated: bool) -> Named | None:
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
        own, matched = (
            dict.fromkeys(given, True) if isinstance(given, Mapping) else {}
            for given in (keywords.get("properties"), keywords.get("patternProperties"))
        )
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
    return not problem_of_part(json.dumps({"type": "object", "patternProperties": names}))


def _whole(number: Any) -> Any:
    """Return ``2`` for ``2.0``, which is the same number in JSON Schema."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
