"""Least frequently used."""

from __future__ import annotations

from collections.abc import Hashable

from ragkv.store.tiers.policies.base import Policy, Record


class Frequency(Policy):
    """Evicts the entry with the fewest uses first."""

    def priority(self, key: Hashable, record: Record) -> float:  # noqa: ARG002
        """Return the number of uses."""
        return float(record.uses)


POLICY = Frequency
