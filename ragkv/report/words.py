"""Numbers and texts in words, for the terminal and for the page."""

from __future__ import annotations

from html import escape


def count(number: int, thing: str) -> str:
    """``1 token``, ``2,013 tokens``, ``2 entries``; the last word takes the plural."""
    if number != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{number:,} {thing}"


def unbroken_count(number: int, thing: str) -> str:
    """Return :func:`count` on one line."""
    return count(number, thing).replace(" ", "\u00a0")


def safe(text: str) -> str:
    """Escape a text so that a browser shows exactly its characters.

    Browsers read a bare carriage return as a line feed, so it is escaped. HTML has no null
    character; U+2400 replaces it.
    """
    return escape(text).replace("\r", "&#13;").replace("\0", "\u2400")


def seconds(value: float) -> str:
    """``97.8 s``, ``1.44 s``, ``27 ms``, ``0.3 ms``."""
    if value >= 0.0995:
        return f"{value:.{2 if value < 9.995 else 1}f}\u00a0s"
    digits = 0 if value >= 0.00095 or not value else 1
    return f"{1000 * value:.{digits}f}\u00a0ms"


def percent(share: float, digits: int = 2) -> str:
    """``57%``, ``5.7%``, ``0.57%``; at most ``digits`` decimals."""
    value = 100 * share
    if 0 < value < 0.5 * 10**-digits:
        return f"<{10**-digits:g}%"
    places = min(digits, 0 if value >= 9.95 or not value else 1 if value >= 0.995 else 2)
    return f"{value:.{places}f}%"


def head(text: str, length: int = 90) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else f"{line[:length].rstrip()}\u2026"
