"""Under which settings repaired rows serve another prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RepairTerms:
    """How a prompt's rows were repaired, or are to be.

    Attributes
    ----------
    settings
        What has to be equal: the method, the sink, and whatever else changes its choice.
    ratio
        The requested recompute ratio.
    """

    settings: tuple[object, ...]
    ratio: float | Literal["auto"]

    def serve(self, wanted: RepairTerms) -> bool:
        """Whether rows of these terms may serve a prompt of the wanted ones.

        Not where more was to be recomputed than was; at ratio 1 only exact rows will do.
        """
        if self.settings != wanted.settings:
            return False
        if isinstance(self.ratio, str) or isinstance(wanted.ratio, str):
            return self.ratio == wanted.ratio
        return wanted.ratio <= self.ratio and wanted.ratio < 1
