"""Copy repair: recompute, while the answer is generated, the stale tokens it is about to copy.

A model copies a name by attending, from the token just generated, to the token after an
earlier occurrence of it. The query's attention before the answer begins does not show where
that will be, and a copy goes wrong where its tokens are stale and their rivals are not. So
each decoding step also recomputes the stale tokens after the occurrences of its own token in
the chunks; the first token is not delayed. Occurrences are found as prompt lookup decoding
finds its drafts: by the longest match of the last tokens. One frequent token alone is no match.

An answer has few rows for this, so that it takes about as long as without. A draft ends before
a token that has something to repair: every token is computed over the same rows, with drafts and
without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragkv.prompt.history import Positions, TokenHistory
from ragkv.select.method import CopyLookup, FloatArray
from ragkv.splice.layout import Layout


class CopyRepair:
    """The stale tokens of a prompt, and which of them the next step recomputes.

    Parameters
    ----------
    layout
        Origin of every prompt token.
    rows
        ``[rows]`` positions computed before the first token was generated.
    scores
        ``[cached]`` the ranking of the cached tokens: among matches of one length those
        with higher scores behind them come first.

    Attributes
    ----------
    taken
        ``[rows]`` positions that were recomputed since, each once.
    """

    def __init__(
        self, layout: Layout, rows: Positions, scores: FloatArray, lookup: CopyLookup
    ) -> None:
        self.prompt = layout.ids
        self.taken = np.zeros(0, np.int64)
        self._stale = np.zeros(len(layout), dtype=bool)
        self._stale[layout.stale(rows)] = True
        self._lookup = lookup
        # per position, the highest score from it to ``lookup.tokens`` positions later
        padded = np.zeros(len(layout) + lookup.tokens, dtype=np.float32)
        padded[layout.cached] = scores
        self._scores = np.lib.stride_tricks.sliding_window_view(padded, lookup.tokens + 1).max(1)

    @property
    def repaired(self) -> int:
        """Number of the positions taken."""
        return len(self.taken)

    def take(self, history: TokenHistory) -> Positions:
        """Return the positions to recompute now, sorted, and mark them repaired.

        ``history``'s last token is the one to compute next.
        """
        chosen = self._due(history)
        self._stale[chosen] = False
        self.taken = np.concatenate([self.taken, chosen])
        return chosen

    def without_repair(self, history: TokenHistory, draft: Sequence[int]) -> Sequence[int]:
        """Return a draft's tokens before the first one that has something to repair."""
        length, kept = len(history), 0
        for token in draft:
            history.append([token])
            if len(self._due(history)):
                break
            kept += 1
        history.truncate(length)
        return draft[:kept]

    def _due(self, history: TokenHistory) -> Positions:
        lookup, drawn = self._lookup, len(history) - history.prompt_tokens
        most = lookup.rows * (1 + drawn // lookup.every) - len(self.taken)
        if most <= 0:
            return np.zeros(0, np.int64)
        at, length = history.occurrences()
        in_prompt = at < len(self.prompt) - 1
        at, length = at[in_prompt], length[in_prompt]
        if len(at) > lookup.rare:
            at, length = at[length > 1], length[length > 1]
        order = at[np.lexsort((-self._scores[at], -length))]
        near = (order[:, None] + np.arange(lookup.tokens + 1)).reshape(-1)
        near = near[near < len(self.prompt)]
        near = near[self._stale[near]]
        _, first = np.unique(near, return_index=True)
        return np.sort(near[np.sort(first)[:most]])
