"""Answers from reused chunks compared with full attention's, and the bounds for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

KEPT, AGREEMENT = 0.9, 0.7
"""Least shares of full attention's right answers, and of its tokens, that reuse must keep."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Answers at a ratio.

    Attributes
    ----------
    examples
        Prompts; the right answer to each is one record.
    full_copies, copies, kept_copies
        Right answers: full attention's, the method's, and both.
    agreement
        Mean share of full attention's answer, in tokens, before the first difference.
    """

    ratio: float | Literal["auto"]
    examples: int
    full_copies: int
    copies: int
    kept_copies: int
    agreement: float

    @property
    def kept(self) -> float | None:
        """The method's share of full attention's right answers.

        None if full attention answers less than half of all prompts right: too few to judge by.
        """
        enough = 2 * self.full_copies >= self.examples
        return self.kept_copies / self.full_copies if enough else None

    @property
    def holds(self) -> bool:
        """Whether neither share is below its bound by more than a standard error."""
        copied = self.kept is None or self.kept >= least(KEPT, self.full_copies)
        return copied and self.agreement >= least(AGREEMENT, self.examples)


def least(share: float, examples: int) -> float:
    """Return a share minus the largest standard error of a mean over the examples.

    Values between 0 and 1 whose mean is ``share`` vary by at most ``share * (1 - share)``.
    """
    return share - sqrt(share * (1 - share) / examples)


def is_copied(answer: str, record: str) -> bool:
    """Whether an answer contains a record exactly, except for white space."""
    return " ".join(record.split()) in " ".join(answer.split())
