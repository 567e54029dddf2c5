"""Reuse frequency (Cache-Craft, arXiv 2502.15734, section 4)."""

from __future__ import annotations

from collections.abc import Hashable

from ragkv.store.tiers.policies.base import Policy, Record


class Frequency(Policy):
    """What was reused least leaves first; a use counts more the less had to be recomputed."""

    def priority(self, key: Hashable, record: Record) -> float:  # noqa: ARG002
        """Return ``f_r``, the sum over the uses of one over the share recomputed (CFO)."""
        return record.weight


POLICY = Frequency
