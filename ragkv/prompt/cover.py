"""Choose, among spans that may overlap, those that cover the most characters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

_CHARACTER = 1 << 20  # a character outweighs any number of spans; then fewer spans win


def cover(
    starts: Sequence[int], ends: Sequence[int], shortest: int | None = None
) -> list[tuple[int, int]]:
    """Choose the spans that together cover the most characters without overlapping.

    Dynamic programming from the last span to the first (weighted interval
    scheduling). Of equal covers one with the fewest spans is taken.

    Parameters
    ----------
    starts, ends
        The candidates, at most one a start, in ascending order of ``starts``.
    shortest
        A span may be cut where the next one begins if this many characters of it
        remain. ``None``: spans are taken whole or not at all.

    Returns
    -------
    list of (candidate, end)
        The chosen candidates' indices in ascending order, each with its end.
    """
    count = len(starts)
    worth = np.zeros(count + 1, np.int64)  # of the best cover by candidates k, k + 1, ...
    reach = np.zeros(count, np.int64)  # the same, plus the characters in front of k
    taken: list[tuple[int, int] | None] = [None] * count  # (end, next candidate)
    for k in range(count - 1, -1, -1):
        start, end = starts[k], ends[k]
        after = bisect_left(starts, end, lo=k + 1)
        best, choice = end * _CHARACTER + int(worth[after]), (end, after)
        if shortest is not None:
            first = bisect_left(starts, start + shortest, lo=k + 1)
            if first < after:
                cut = first + int(reach[first:after].argmax())
                if reach[cut] > best:
                    best, choice = int(reach[cut]), (starts[cut], cut)
        best -= start * _CHARACTER + 1
        if best >= worth[k + 1]:
            taken[k] = choice
        worth[k] = max(best, int(worth[k + 1]))
        reach[k] = start * _CHARACTER + worth[k]
    chosen, k = [], 0
    while k < count:
        choice_k = taken[k]
        if choice_k is None:
            k += 1
        else:
            chosen.append((k, choice_k[0]))
            k = choice_k[1]
    return chosen
