"""Which objects are closed: have the properties that their schema names, and no others.

An object whose schema has ``properties`` and says nothing of other properties is closed. Its
schema is all that it has to follow: ``$ref``, ``allOf``, and the chosen branch of ``anyOf`` and
``oneOf`` name properties, too. An object whose schema says something of others (with
``additionalProperties``, ``patternProperties``, ``propertyNames``, ``unevaluatedProperties``), or
names none, keeps what it says: ``dict[str, int]`` and ``extra="allow"`` of pydantic are open.

So it is as if every schema with ``properties`` had ``"unevaluatedProperties": false``, and one
function serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.config.json_schema.parts import UNEVALUATED, UNKNOWN, Schema, SchemaParts, unions_of


@dataclass(frozen=True, slots=True)
class NamedProperties:
    """The properties that a schema says something of.

    Attributes
    ----------
    names, patterns
        Their names, in the order of the document, and patterns of names.
    others
        Whether the schema says something of all others itself.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    others: bool = False

    def __or__(self, other: NamedProperties) -> NamedProperties:
        return NamedProperties(
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            self.others or other.others,
        )

    def __ge__(self, other: NamedProperties) -> bool:
        return not (
            set(other.names) - set(self.names)
            or set(other.patterns) - set(self.patterns)
            or other.others > self.others
        )


def named_by(part: Schema, parts: SchemaParts, *, stated: bool) -> NamedProperties:
    """Return what a part says of properties, its unions aside.

    Parameters
    ----------
    stated
        Whether ``unevaluatedProperties`` is stated, and not the rule: then names that are only
        required count as others.
    """
    if (UNEVALUATED | UNKNOWN) & part.keys():
        return NamedProperties(others=True)
    names, patterns = _names(part.get("properties")), _names(part.get("patternProperties"))
    others = "additionalProperties" in part
    if not stated:
        names += tuple(each for each in part.get("required") or () if isinstance(each, str))
        least = part.get("minProperties")
        others |= bool(patterns) or "propertyNames" in part
        others |= isinstance(least, int) and least > len(names) > 0
    named = NamedProperties(names, patterns, others)
    for keyword in ("if", "then", "else"):  # not followed, so they may hold
        if keyword in part:
            named |= named_in((part[keyword],), parts, stated=stated)
    return named


def named_in(
    branches: tuple[Any, ...],
    parts: SchemaParts,
    *,
    stated: bool,
    seen: frozenset[int] = frozenset(),
) -> NamedProperties:
    """Return what any of a union's branches says of properties."""
    named = NamedProperties()
    for branch in branches:
        if id(branch) in seen:
            continue
        if isinstance(branch, Mapping) and "unevaluatedProperties" in branch:
            named |= NamedProperties(others=True)
        inside = seen | {id(branch)}
        for part in parts.of(branch):
            named |= named_by(part, parts, stated=stated)
            for union in unions_of(part):
                named |= named_in(union.branches, parts, stated=stated, seen=inside)
    return named


def _names(given: Any) -> tuple[str, ...]:
    return tuple(given) if isinstance(given, Mapping) else ()
