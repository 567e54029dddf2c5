"""Counted nouns."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """``1 token``, ``2,013 tokens``, ``2 entries``; the last word takes the plural."""
    if number != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{number:,} {thing}"
