"""What a policy is: it sees every use of a tier's entries and says which leaves first."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

_SPARE = 64


@dataclass(slots=True)
class Record:
    """What a policy knows of an entry.

    Attributes
    ----------
    nbytes
        Bytes that it takes in the tier.
    cost, tokens
        What computing it took when it was last missed, and the tokens that were new then.
    uses
        Requests that wanted it since it came, the one that brought it included.
    last
        When it was last wanted, in uses of the whole tier.
    """

    nbytes: int
    cost: float = 0.0
    tokens: int = 1
    uses: int = 0
    last: int = 0


class Policy(ABC):
    """Ranks the entries of one tier. Not safe to share between threads.

    Every use gives its entry a new priority; the entry with the lowest leaves first, and
    of equal ones the one that was not wanted for longest. ``clock`` is the highest
    priority that ever left by eviction: a policy that adds it ages its entries.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.nbytes = 0
        self._records: dict[Hashable, Record] = {}
        self._ranks: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []  # stale items are skipped
        self._now = 0

    @abstractmethod
    def priority(self, key: Hashable, record: Record) -> float:
        """Return an entry's priority, had it just been used."""

    def insert(self, key: Hashable, nbytes: int, cost: float = 0.0, tokens: int = 1) -> None:
        """Note an entry that a request missed and that is in the tier now.

        Parameters
        ----------
        cost, tokens
            What computing it took, and the tokens that were new to that computation.
        """
        self.remove(key)
        self._records[key] = Record(nbytes, cost, tokens)
        self.nbytes += nbytes
        self.hit(key)

    def hit(self, key: Hashable) -> None:
        """Count a use."""
        record = self._records[key]
        self._now += 1
        record.uses += 1
        record.last = self._now
        self.count(key, record)
        rank = self._rank(key, record)
        heapq.heappush(self._heap, (*rank, key))
        if len(self._heap) > 2 * len(self._records) + _SPARE:
            self._heapify()

    def count(self, key: Hashable, record: Record) -> None:
        """Enter a use, before its priority is asked for, where the record does not suffice."""
        del key, record

    def _rank(self, key: Hashable, record: Record) -> tuple[float, int]:
        rank = self._ranks[key] = self.priority(key, record), record.last
        return rank

    def _heapify(self) -> None:
        self._heap = [(*rank, key) for key, rank in self._ranks.items()]
        heapq.heapify(self._heap)

    def victims(self, nbytes: int) -> list[Hashable]:
        """Return the keys to evict, lowest first, so that this many bytes come free.

        They stay noted until :meth:`evict`. All keys, where they are not enough.
        """
        found: list[tuple[float, int, Hashable]] = []
        free = 0
        while free < nbytes and self._heap:
            item = heapq.heappop(self._heap)
            if self._ranks.get(item[2]) == item[:2]:
                found.append(item)
                free += self._records[item[2]].nbytes
        for item in found:
            heapq.heappush(self._heap, item)
        return [key for _, _, key in found]

    def evict(self, key: Hashable) -> None:
        """Forget an entry that left for want of room, and age the others."""
        self.clock = max(self.clock, self._ranks[key][0])
        self.remove(key)

    def remove(self, key: Hashable) -> None:
        """Forget an entry; one that is not noted is no error."""
        record = self._records.pop(key, None)
        if record is not None:
            self.nbytes -= record.nbytes
            del self._ranks[key]

    def size(self, key: Hashable) -> int:
        """Return an entry's bytes, 0 where it is not noted."""
        record = self._records.get(key)
        return 0 if record is None else record.nbytes

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._records))
