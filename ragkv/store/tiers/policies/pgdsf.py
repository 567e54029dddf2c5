"""Prefix-aware greedy dual, size and frequency (RAGCache, arXiv 2404.12457, section 5.1).

The priority is ``clock + frequency * mean over the misses of cost / new tokens``: a
request that misses an entry pays, for each new token, what its own cached and new lengths
make it cost. Frequency and misses outlive eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from ragkv.store.tiers.policies.base import Policy, Record

REMEMBERED = 1 << 16
"""Entries whose history is kept, in the tier or not."""


@dataclass(slots=True)
class _History:
    requests: int = 0
    misses: int = 0
    cost: float = 0.0  # sum over the misses, per new token


class PGDSF(Policy):
    """What is cheap to compute and seldom wanted leaves first, clock aside."""

    def __init__(self) -> None:
        super().__init__()
        self._histories: OrderedDict[int, _History] = OrderedDict()  # by hash: no text is kept

    def count(self, key: Hashable, record: Record) -> None:
        """Count a request, and a miss where the entry has just come."""
        history = self._histories.setdefault(hash(key), _History())
        self._histories.move_to_end(hash(key))
        history.requests += 1
        if record.uses == 1:
            history.misses += 1
            history.cost += record.cost / max(1, record.tokens)
        while len(self._histories) > REMEMBERED:
            self._histories.popitem(last=False)

    def priority(self, key: Hashable, record: Record) -> float:  # noqa: ARG002
        """Return ``clock + frequency * mean cost``."""
        history = self._histories[hash(key)]
        return self.clock + history.requests * history.cost / max(1, history.misses)


POLICY = PGDSF
