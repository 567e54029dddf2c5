"""Admission to a full tier: only for entries requested more often than those they would evict.

TinyLFU (Einziger, Friedman, Manes, arXiv 1512.00727): a small sketch counts recent requests, for
entries in the tier or not, and forgets by halving.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_ROWS, _BITS = 4, 13
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_HALVES = bytes(count >> 1 for count in range(256))
_MASK = (1 << 64) - 1


class CountSketch:
    """Counts keys in 32 KB: an estimate is never too low, up to 255, and seldom too high."""

    def __init__(self) -> None:
        self._counts = bytearray(_ROWS << _BITS)

    def add(self, key: Hashable) -> None:
        """Count a key once more; only its lowest counters grow."""
        places = self._places(key)
        low = min(self._counts[place] for place in places)
        if low < 255:
            for place in places:
                if self._counts[place] == low:
                    self._counts[place] += 1

    def estimate(self, key: Hashable) -> int:
        """Return an upper bound of a key's count."""
        return min(self._counts[place] for place in self._places(key))

    def halve(self) -> None:
        """Halve all counts."""
        self._counts = self._counts.translate(_HALVES)

    @staticmethod
    def _places(key: Hashable) -> list[int]:
        mixed = hash(key) & _MASK
        mixed ^= mixed >> 32
        return [
            (row << _BITS) + ((mixed * mixer & _MASK) >> (64 - _BITS))
            for row, mixer in enumerate(_MIXERS)
        ]


class Admission:
    """Keeps rarely requested entries from evicting frequently requested ones.

    Parameters
    ----------
    memory
        Counts are halved after this many requests for each entry in the tier.
    """

    def __init__(self, memory: int = 10) -> None:
        self._memory = memory
        self._sketch = CountSketch()
        self._requests = 0

    def count(self, key: Hashable, entries: int) -> None:
        """Count a request for a key, whether it is in the tier (of ``entries``) or not."""
        self._sketch.add(key)
        self._requests += 1
        if self._requests >= self._memory * max(entries, 100):
            self._sketch.halve()
            self._requests = 0

    def admits(self, key: Hashable, victims: Iterable[Hashable]) -> bool:
        """Whether the key was requested more often than each of its victims."""
        requests = self._sketch.estimate(key)
        return all(requests > self._sketch.estimate(victim) for victim in victims)
