"""Few cases of many axes: every pair of values of any two axes occurs together."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of the axes' values, each the one with the most pairs not seen yet."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    unseen = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while unseen:
        best = max(cases, key=lambda case: len(unseen & _pairs(case)))
        unseen -= _pairs(best)
        chosen.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return chosen


def _pairs(case: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(case), 2))
