"""HeadIndex: an immutable set of texts, looked up by their heads.

The texts are sorted, so the text with the longest common head with a string is adjacent to the
string's insertion point. Thousands of texts with the same head cost only a few more comparisons.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ragkv.prompt.rolling import Hashes, head_hashes


class HeadIndex:
    """Texts of at least ``width`` characters, found by their heads.

    Every lookup takes ``live``, the texts that are not deleted, so that a deletion needs no new
    index.
    """

    def __init__(self, texts: Iterable[str], width: int) -> None:
        self.width = width
        self.texts = sorted(texts)
        self._longest = max(map(len, self.texts), default=0)
        self._hashes = np.unique(head_hashes(self.texts, width))
        bits = max(10, len(self._hashes).bit_length() + 4)
        self._shift = np.uint64(64 - bits)
        self._seen = np.zeros(1 << bits, np.bool_)  # by a hash's first bits: 16 to 32 a text
        self._seen[self._hashes >> self._shift] = True
        self._heads = _longest_heads(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def candidates(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """Return the possible offsets of heads, from the hashes of all windows."""
        maybe = np.flatnonzero(self._seen[hashes >> self._shift])
        found = hashes[maybe]
        place = np.searchsorted(self._hashes, found)
        place[place == len(self._hashes)] = 0
        offsets: npt.NDArray[np.intp] = maybe[self._hashes[place] == found]
        return offsets

    def whole(self, prompt: str, start: int, live: Collection[str]) -> str | None:
        """Return the longest live text that ``prompt[start:]`` begins with."""
        rest = prompt[start : start + self._longest]
        place = bisect_right(self.texts, rest) - 1
        if place < 0:
            return None
        # Texts that `rest` begins with sort no later than this one, so they are its heads.
        common = common_head(self.texts[place], rest)
        at: int | None = place
        while at is not None and (len(self.texts[at]) > common or self.texts[at] not in live):
            at = self._heads.get(at)
        return None if at is None else self.texts[at]

    def head(self, prompt: str, start: int, live: Collection[str]) -> tuple[int, str] | None:
        """Return the longest head in common with ``prompt[start:]``, and its live text."""
        rest = prompt[start : start + self._longest]
        place = bisect_right(self.texts, rest)
        sides: tuple[Sequence[int], ...] = (
            range(place - 1, -1, -1),
            range(place, len(self.texts)),
        )
        found = []
        for side in sides:
            text = next((self.texts[i] for i in side if self.texts[i] in live), None)
            if text is not None:
                found.append((common_head(text, rest), text))
        return max(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)


def _longest_heads(texts: Sequence[str]) -> dict[int, int]:
    """Return, for each of the sorted texts that begins with another, the longest such."""
    heads: dict[int, int] = {}
    open_heads: list[int] = []
    for i, text in enumerate(texts):
        while open_heads and not text.startswith(texts[open_heads[-1]]):
            open_heads.pop()
        if open_heads:
            heads[i] = open_heads[-1]
        open_heads.append(i)
    return heads


def common_head(one: str, other: str) -> int:
    """Return the length of the common head of two strings."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
