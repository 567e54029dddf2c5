"""The tokens of a prompt, for a report's page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A prompt's text, and its tokens' offsets and scores.

    Attributes
    ----------
    text
        The rendered prompt.
    offsets
        ``[tokens, 2]`` int32: each token's first character and its end.
    scores
        ``[tokens]`` float32: the method's score of each cached token; NaN without one.
    attention
        Whether scores are shares of the query's attention.
    """

    text: str
    offsets: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    attention: bool = False

    @property
    def scored(self) -> bool:
        """Whether any token was scored: none is at ratios 0 and 1, or by some methods."""
        return not np.isnan(self.scores).all()

    def pieces(self) -> list[str]:
        """Return each token's characters; joined, they are the text.

        A character of several tokens, such as an emoji, is the first token's. Characters that
        no token covers belong to the next token, at the end to the last one.
        """
        if not len(self.offsets):
            return []
        ends = np.maximum.accumulate(self.offsets[:, 1]).tolist()
        ends[-1] = len(self.text)
        return [self.text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
