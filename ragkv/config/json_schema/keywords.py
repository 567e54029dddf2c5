"""The keywords of one part of a schema, as llguidance has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ragkv.config.json_schema.formats import FORMATS, KNOWN, LONGEST, patterns_of
from ragkv.config.json_schema.grammar import problem_of_part
from ragkv.config.json_schema.parts import FALSE, UNKNOWN, Schema, SchemaParts
from ragkv.errors import ConfigError

_AS_THEY_ARE = (
    *("type", "enum", "const", "required", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "not": (False,)}


class Writer(Protocol):
    """What writes the schemas inside a part."""

    parts: SchemaParts

    def schema(self, given: Any, place: str) -> Any:
        """Return what stands for a schema at a place."""
        ...

    def ignore(self, place: str, keyword: str) -> None:
        """Note that a keyword is not followed at a place."""
        ...


def written(part: Schema, place: str, writer: Writer) -> list[dict[str, Any]]:
    """Return the keywords of a part, its unions aside, as schemas that all have to be followed."""
    out: dict[str, Any] = {name: part[name] for name in _AS_THEY_ARE if name in part}
    for name in _COUNTS:
        if name in part:
            out[name] = _whole(part[name])
    further = list(_strings(part, out, place, writer))
    _arrays(part, out, place, writer)
    _objects(part, out, place, writer)
    further += _names(part, place, writer)
    for keyword in UNKNOWN & part.keys():
        writer.ignore(place, f"{keyword} {part[keyword]!r}")
    for keyword in ("not", "uniqueItems"):
        if keyword in part and part[keyword] not in _NO_EFFECT.get(keyword, ()):
            if keyword == "not" and part["not"] in (True, {}):
                further.append(dict(FALSE))
            else:
                writer.ignore(place, keyword)
    if "if" in part and ("then" in part or "else" in part):
        writer.ignore(place, "if")
    return [out, *further]


def _strings(
    part: Schema, out: dict[str, Any], place: str, writer: Writer
) -> Iterator[dict[str, Any]]:
    """Take over ``pattern`` and ``format``, and yield further patterns."""
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
        writer.ignore(place, f"format {form!r}")
    if pattern is not None:
        found = patterns_of(pattern) if isinstance(pattern, str) else [pattern]
        if any(problem_of_part(json.dumps({"type": "string", "pattern": each})) for each in found):
            writer.ignore(place, "pattern")
        else:
            patterns += found
    if patterns:
        out["pattern"] = patterns[0]
    yield from ({"pattern": each} for each in patterns[1:])


def _arrays(part: Schema, out: dict[str, Any], place: str, writer: Writer) -> None:
    items, prefix = part.get("items"), part.get("prefixItems")
    if isinstance(items, list):  # as it was written before 2020-12
        items, prefix = part.get("additionalItems"), items
    if isinstance(prefix, list):
        out["prefixItems"] = [
            writer.schema(each, f"{place}[{index}]") for index, each in enumerate(prefix)
        ]
    if items is not None:
        out["items"] = writer.schema(items, f"{place}[]")
    if "contains" in part and (part.get("minContains") != 0 or "maxContains" in part):
        writer.ignore(place, "contains")


def _objects(part: Schema, out: dict[str, Any], place: str, writer: Writer) -> None:
    named, matched = part.get("properties"), part.get("patternProperties")
    if named is not None:
        out["properties"] = _members(part, "properties", place, writer)
    if matched is not None:
        if are_usable(matched):
            out["patternProperties"] = _members(part, "patternProperties", place, writer)
        else:
            writer.ignore(place, "patternProperties")
            return
    if "additionalProperties" in part:
        out["additionalProperties"] = writer.schema(part["additionalProperties"], f"{place}.*")


def _members(part: Schema, keyword: str, place: str, writer: Writer) -> dict[str, Any]:
    given = part[keyword]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{keyword} must be schemas by name, not {given!r}")
    return {name: writer.schema(each, f"{place}.{name}") for name, each in given.items()}


def are_usable(patterns: Any) -> bool:
    """Return whether llguidance can tell apart the names that patterns match."""
    if not isinstance(patterns, Mapping):
        return True
    names = dict.fromkeys(patterns, True)
    return not problem_of_part(json.dumps({"type": "object", "patternProperties": names}))


def _names(part: Schema, place: str, writer: Writer) -> Iterator[dict[str, Any]]:
    """Yield ``propertyNames`` as the properties that there may be, or as their pattern."""
    if part.get("propertyNames", True) in (True, {}):
        return
    found = writer.parts.of(part["propertyNames"])
    wanted = found[0] if len(found) == 1 and found[0].get("type", "string") == "string" else {}
    values = wanted.get("enum", [wanted["const"]] if "const" in wanted else None)
    pattern = wanted.get("pattern")
    keywords = wanted.keys() - {"type"}
    if "format" in wanted:
        pattern = FORMATS.get(wanted["format"]) and f"^(?:{FORMATS[wanted['format']]})$"
    elif keywords and keywords <= {"minLength", "maxLength"}:
        least, most = _whole(wanted.get("minLength", 0)), _whole(wanted.get("maxLength", ""))
        pattern = rf"^[\s\S]{{{least},{most}}}$"
    if isinstance(values, list) and len(keywords) == 1 and all(isinstance(v, str) for v in values):
        yield {"properties": dict.fromkeys(values, True), "additionalProperties": False}
    elif (
        isinstance(pattern, str)
        and (len(keywords) == 1 or keywords <= {"minLength", "maxLength"})
        and "patternProperties" not in part
        and are_usable({pattern: True})
    ):
        yield {"patternProperties": {pattern: True}, "additionalProperties": False}
    else:
        writer.ignore(place, "propertyNames")


def _whole(number: Any) -> Any:
    """Return ``2`` for ``2.0``, which JSON Schema takes for the same."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
