"""Who may enter a full tier: what is asked for more often than those who would leave.

TinyLFU (Einziger, Friedman, Manes, arXiv 1512.00727): a small sketch counts what was asked
for lately, entries in the tier or not, and forgets by halving.
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
        """Count a key once more; only the counters that are not too high already grow."""
        places = self._places(key)
        low = min(self._counts[place] for place in places)
        if low < 255:
            for place in places:
                if self._counts[place] == low:
                    self._counts[place] += 1

    def estimate(self, key: Hashable) -> int:
        """Return how often a key was counted, at least."""
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
    """Keeps entries that are asked for once from flushing those that are asked for often.

    Parameters
    ----------
    memory
        Counts are halved after this many requests for each entry in the tier.
    """

    def __init__(self, memory: int = 10) -> None:
        self._memory = memory
        self._sketch = CountSketch()
        self._asked = 0

    def count(self, key: Hashable, entries: int) -> None:
        """Count a request for a key, whether it is in the tier (of ``entries``) or not."""
        self._sketch.add(key)
        self._asked += 1
        if self._asked >= self._memory * max(entries, 100):
            self._sketch.halve()
            self._asked = 0

    def admits(self, key: Hashable, victims: Iterable[Hashable]) -> bool:
        """Whether the key is asked for more often than each of those who would leave."""
        wanted = self._sketch.estimate(key)
        return all(wanted > self._sketch.estimate(victim) for victim in victims)
