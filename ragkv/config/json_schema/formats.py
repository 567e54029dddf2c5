"""Formats of strings as patterns, and patterns in llguidance's syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
_LABEL = r"[A-Za-z\d](?:[A-Za-z\d-]{0,61}[A-Za-z\d])?"
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
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
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

KNOWN = ("duration", "email", "uri")
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
