"""llguidance's grammars of JSON schemas, its errors, and patterns of strings in its syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators that models are trained to write."""

_TYPES = ("null", "boolean", "number", "string", "array", "object")


def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return llguidance's matcher, with ten times its default of alternatives that begin alike."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def grammar_from(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a schema that it can enforce."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_SEPARATORS)


def problem_of(grammar: str) -> str:
    """Return llguidance's error for a grammar, or an empty string."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar)
    return "" if problem.startswith("WARNING") else problem


def is_supported(schema: Mapping[str, Any]) -> bool:
    """Return whether llguidance can enforce a schema, which may be unsatisfiable."""
    problem = problem_of(grammar_from(schema))
    return not problem or "Unsatisfiable" in problem


def are_disjoint(branches: Sequence[Sequence[Any]], definitions: Mapping[str, Any]) -> bool:
    """Return whether certainly no value satisfies two branches of a ``oneOf``.

    Parameters
    ----------
    branches
        Each branch's alternatives, as llguidance takes them.
    definitions
        The targets of their references.
    """
    one_of = {"oneOf": [{"anyOf": each} for each in branches]}
    # llguidance compares branches but not references: the intersection replaces references.
    if is_supported({"allOf": [one_of, {"type": _TYPES}], "$defs": definitions}):
        return True
    # It compares a limited number of pairs. A constant can tell more branches apart.
    found = [[_constants(each, definitions) for each in branch] for branch in branches]
    return any(_differs(name, found) for name in found[0][0])


def _differs(name: str, branches: Sequence[Sequence[Mapping[str, str]]]) -> bool:
    """Return whether a property is constant in each branch, with different values in each two."""
    values = [{constants.get(name) for constants in branch} for branch in branches]
    together = set().union(*values)
    return None not in together and len(together) == sum(map(len, values))


def _constants(schema: Any, definitions: Mapping[str, Any]) -> dict[str, str]:
    """Return the constants, texts or whole numbers, of an object's required properties."""
    whole = _target(schema, definitions)
    parts = [_target(part, definitions) for part in whole.get("allOf", [whole])]
    objects = [part for part in parts if part.get("type") == "object"]
    required = {name for part in objects for name in part.get("required", ())}
    members = [each for part in parts for each in part.get("properties", {}).items()]
    values = [(name, _target(value, definitions).get("const")) for name, value in members]
    return {
        name: json.dumps(value)
        for name, value in values
        if name in required and isinstance(value, str | int)
    }


def _target(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(schema, Mapping) and "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema, Mapping) else {}


_LONG_MONTH = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
_SHORT_MONTH = r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
_FEBRUARY = r"02-(?:0[1-9]|1\d|2[0-8])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = rf"(?:\d{{4}}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_OFFSET = r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = (
    rf"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_OFFSET}"
    r"|23:59:60(?:\.\d+)?(?:[Zz]|[+-]00:00))"
)
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[\dA-Fa-f]{1,4}"
_LAST = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"(?:{_GROUP}:){{6}}{_LAST}",
        rf"::(?:{_GROUP}:){{0,5}}{_LAST}",
        *(
            rf"{_GROUP}(?::{_GROUP}){{0,{before}}}::(?:{_GROUP}:){{0,{4 - before}}}{_LAST}"
            for before in range(5)
        ),
        rf"(?:{_GROUP}(?::{_GROUP}){{0,5}})?::{_GROUP}",
        rf"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::",
    ]
)
_HEX = r"[\dA-Fa-f]"
_UUID = "H{{8}}-H{{4}}-{0}H{{3}}-{1}H{{3}}-H{{12}}".replace("H", _HEX)

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "time": _TIME,
    "ipv6": _IPV6,
    "ipvanyaddress": rf"{_IPV4}|{_IPV6}",
    "base64": r"(?:[A-Za-z\d+/]{4})*(?:[A-Za-z\d+/]{2}==|[A-Za-z\d+/]{3}=)?",
    "base64url": r"(?:[A-Za-z\d_-]{4})*(?:[A-Za-z\d_-]{2}==|[A-Za-z\d_-]{3}=)?",
    "uuid": _UUID.format(_HEX, _HEX),
    **{f"uuid{version}": _UUID.format(version, r"[89ABab]") for version in (1, 3, 4, 5, 6, 7, 8)},
}
"""Formats as patterns of whole strings, where llguidance has none or a looser one.

Leap seconds are only allowed in UTC. The punycode of host names (``xn--``) is not checked.
"""

KNOWN = ("duration", "email", "hostname", "ipv4", "uri")
"""Formats that llguidance enforces as JSON Schema defines them."""


def pattern_of(form: object) -> str | None:
    """Return the pattern of a format of :data:`FORMATS`, or None."""
    return f"^(?:{FORMATS[form]})$" if isinstance(form, str) and form in FORMATS else None


_NOT_ALL_OF = re.compile(
    r"\^\(\?!\^?\[(?P<characters>[^\]\\^][^\]\\]*)\]\*\$\)(?P<rest>.*)", re.DOTALL
)


def patterns_of(pattern: str) -> list[str]:
    r"""Return patterns without look-ahead whose conjunction is a pattern of a known form.

    pydantic writes decimals as ``^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$``, i.e. with a further character.
    """
    found = _NOT_ALL_OF.fullmatch(pattern)
    if found is None:
        return [pattern]
    return [f"^{found['rest']}", f"[^{found['characters']}]"]
