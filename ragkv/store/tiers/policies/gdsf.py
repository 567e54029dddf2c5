"""Greedy dual, size and frequency (Cherkasova, HP Labs 1998; RAGCache's baseline)."""

from __future__ import annotations

from collections.abc import Hashable

from ragkv.store.tiers.policies.base import Policy, Record


class GDSF(Policy):
    """What saves the fewest seconds a byte leaves first; what was popular once ages."""

    def priority(self, key: Hashable, record: Record) -> float:  # noqa: ARG002
        """Return ``clock + frequency * cost / size``."""
        return self.clock + record.uses * record.seconds / max(1, record.nbytes)


POLICY = GDSF
