"""Which tokens to compute while the answer is drawn: those that it may copy next.

A model copies a name by looking, from the token that it has just drawn, for the token behind
an earlier occurrence of it. What the query attends to before the answer begins does not say
where that will be, and a copy goes wrong where its tokens are stale and their rivals are not.
So when a token has been drawn, the stale tokens behind its occurrences in the chunks are
computed again in the same step that computes the drawn token: the first token comes as early
as ever. Where to look is found as prompt lookup decoding finds its drafts, by the longest
match of the last tokens; one frequent token alone says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ragkv.select.method import FloatArray, Lookup
from ragkv.splice.layout import Layout

Positions = npt.NDArray[np.int64]
_LONGEST = 8
"""Longer matches count as this long."""


class Ahead:
    """The stale tokens of a prompt, and which of them come next.

    Parameters
    ----------
    layout
        The prompt's plan.
    rows
        ``[rows]`` positions that were computed before the first token was drawn.
    scores
        ``[cached]`` what the cached tokens were ranked by: among matches of one length those
        with higher scores behind them come first.
    """

    def __init__(self, layout: Layout, rows: Positions, scores: FloatArray, lookup: Lookup) -> None:
        self.prompt = layout.ids
        self.repaired = 0
        self._stale = np.zeros(len(layout), dtype=bool)
        self._stale[layout.stale(rows)] = True
        self._lookup = lookup
        # the highest score from a position to ``lookup.tokens`` behind it
        padded = np.zeros(len(layout) + lookup.tokens, dtype=np.float32)
        padded[layout.cached] = scores
        self._scores = np.lib.stride_tricks.sliding_window_view(padded, lookup.tokens + 1).max(1)

    def take(self, answer: Sequence[int]) -> Positions:
        """Return the positions to compute now, sorted; they are stale no longer.

        Parameters
        ----------
        answer
            The tokens drawn so far; the last one has not been computed yet.
        """
        last = np.asarray(answer[-_LONGEST:], dtype=np.int64)
        tail = np.concatenate([self.prompt[-_LONGEST:], last])[-_LONGEST:]
        at = np.flatnonzero(self.prompt[:-1] == tail[-1])
        alike = np.ones(len(at), dtype=bool)
        length = np.zeros(len(at), dtype=np.int64)
        for back in range(len(tail)):
            alike &= (at >= back) & (self.prompt[at - back] == tail[-1 - back])
            length += alike
        if len(at) > self._lookup.rare:
            at, length = at[length > 1], length[length > 1]
        order = at[np.lexsort((-self._scores[at], -length))]
        near = (order[:, None] + np.arange(self._lookup.tokens + 1)).reshape(-1)
        near = near[near < len(self.prompt)]
        near = near[self._stale[near]]
        _, first = np.unique(near, return_index=True)
        chosen = np.sort(near[np.sort(first)[: self._lookup.at_most]])
        self._stale[chosen] = False
        self.repaired += len(chosen)
        return chosen
