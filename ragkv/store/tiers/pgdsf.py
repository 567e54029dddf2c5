"""Prefix-aware greedy dual, size and frequency (RAGCache, arXiv 2404.12457, section 5.1)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

REMEMBERED = 1 << 16
"""Number of entries whose history is kept, in the tier or not."""

_SPARE = 64


@dataclass(slots=True)
class _History:
    requests: int = 0
    misses: int = 0
    cost: float = 0.0  # sum over the misses, per new token


class PGDSF:
    """Ranks the entries of one tier for eviction. Not safe to share between threads.

    The entry with the lowest ``clock + frequency * mean over the misses of cost / new tokens`` is
    evicted first, the least recently used of equal ones. Frequency and misses outlive eviction. The
    clock is the highest priority of any evicted entry, so entries that were popular once age.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.nbytes = 0
        self._sizes: dict[Hashable, int] = {}
        self._histories: OrderedDict[int, _History] = OrderedDict()  # by hash: no text is kept
        self._ranks: dict[Hashable, tuple[float, int]] = {}  # priority, time of the last use
        self._heap: list[tuple[float, int, Hashable]] = []  # stale items are skipped
        self._now = 0

    def insert(self, key: Hashable, nbytes: int, cost: float = 0.0, tokens: int = 1) -> None:
        """Add an entry that a request missed.

        Parameters
        ----------
        cost, tokens
            Cost of computing the entry, and the number of tokens computed.
        """
        self.remove(key)
        self._sizes[key] = nbytes
        self.nbytes += nbytes
        history = self._history(key)
        history.misses += 1
        history.cost += cost / max(1, tokens)
        self.hit(key)

    def hit(self, key: Hashable) -> None:
        """Count a use."""
        history = self._history(key)
        history.requests += 1
        self._now += 1
        priority = self.clock + history.requests * history.cost / max(1, history.misses)
        self._ranks[key] = rank = priority, self._now
        heapq.heappush(self._heap, (*rank, key))
        if len(self._heap) > 2 * len(self._sizes) + _SPARE:
            self._heap = [(*rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def _history(self, key: Hashable) -> _History:
        history = self._histories.setdefault(hash(key), _History())
        self._histories.move_to_end(hash(key))
        while len(self._histories) > REMEMBERED:
            self._histories.popitem(last=False)
        return history

    def victims(self, nbytes: int) -> list[Hashable]:
        """Return the keys to evict to free this many bytes, lowest first; all if too few.

        They stay until :meth:`evict`.
        """
        found: list[tuple[float, int, Hashable]] = []
        free = 0
        while free < nbytes and self._heap:
            item = heapq.heappop(self._heap)
            if self._ranks.get(item[2]) == item[:2]:
                found.append(item)
                free += self._sizes[item[2]]
        for item in found:
            heapq.heappush(self._heap, item)
        return [key for _, _, key in found]

    def evict(self, key: Hashable) -> None:
        """Forget an evicted entry, and age the rest."""
        self.clock = max(self.clock, self._ranks[key][0])
        self.remove(key)

    def remove(self, key: Hashable) -> None:
        """Forget an entry if it is there."""
        if key in self._sizes:
            self.nbytes -= self._sizes.pop(key)
            del self._ranks[key]

    def size(self, key: Hashable) -> int:
        """Return an entry's bytes, 0 if it is not there."""
        return self._sizes.get(key, 0)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._sizes))
