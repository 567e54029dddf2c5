"""Least recently used."""

from __future__ import annotations

from collections.abc import Hashable

from ragkv.store.tiers.policies.base import Policy, Record


class LRU(Policy):
    """What was not wanted for longest leaves first."""

    def priority(self, key: Hashable, record: Record) -> float:  # noqa: ARG002
        """Return the time of the last use."""
        return float(record.last)


POLICY = LRU
