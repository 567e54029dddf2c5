"""The prompt token by token, for a report's page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A prompt's text, its tokens' offsets, and their ranking.

    Attributes
    ----------
    text
        The prompt as the model read it.
    offsets
        ``[tokens, 2]`` int32: the first character of each token and the end.
    scores
        ``[tokens]`` float32: what the cached tokens were ranked by; NaN where nothing was
        scored.
    attention
        Whether scores are shares of the query's attention.
    """

    text: str
    offsets: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    attention: bool = False

    @property
    def scored(self) -> bool:
        """Whether any token was scored: at ratio 0 and 1 none is, nor by some methods."""
        return not np.isnan(self.scores).all()

    def pieces(self) -> list[str]:
        """Return each token's characters; joined they are the text.

        A character of several tokens (an emoji, say) is the first one's. Characters that
        no token covers are given to the token behind them, at the end to the last one.
        """
        if not len(self.offsets):
            return []
        ends = np.maximum.accumulate(self.offsets[:, 1]).tolist()
        ends[-1] = len(self.text)
        return [self.text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
