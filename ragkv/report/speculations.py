"""What speculating gave, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """All speculations of an engine since it was made.

    Attributes
    ----------
    started, finished
        Prompts that were handed in, and those that were computed to their end.
    used, cancelled, failed
        How they ended: a request went on from them; they were given up, by their owner or for
        want of room; an error, which the log has. The others wait, run, or are kept.
    interrupted
        How often one gave way to a real request; it begins anew afterwards.
    overlap_s
        Seconds of computing that were over when the request came, in all that were used.
    wasted_s
        Seconds of computing that nobody used.
    """

    started: int = 0
    finished: int = 0
    used: int = 0
    cancelled: int = 0
    failed: int = 0
    interrupted: int = 0
    overlap_s: float = 0.0
    wasted_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)
