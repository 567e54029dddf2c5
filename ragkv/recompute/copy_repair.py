"""Copy repair: recompute the stale tokens that the answer is about to copy, during decoding.

A model copies a name by attending, from the token just generated, to the token after an earlier
occurrence of it. The query's attention before the answer does not show this place, and a copy goes
wrong if its tokens are stale and competing ones are not. Therefore each decoding step also
recomputes the stale tokens after the occurrences of its own token in the chunks; the first token is
not delayed. Occurrences are found by the longest match of the last tokens, as in prompt lookup
decoding. A frequent token needs a longer match.

An answer has few rows for this, so its time hardly changes. A draft ends before a token with
something to repair: every token is computed over the same rows, with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragkv.prompt.history import Positions, TokenHistory
from ragkv.select.method import CopyLookup, FloatArray
from ragkv.splice.layout import Layout


class CopyRepair:
    """The stale tokens of a prompt, and the choice of those that the next step recomputes.

    Parameters
    ----------
    layout
        Origin of every prompt token.
    rows
        ``[rows]`` positions computed before the first generated token.
    scores
        ``[cached]`` the ranking of the cached tokens: among matches of equal length, those with
        higher scores after them come first.

    Attributes
    ----------
    taken
        ``[rows]`` positions recomputed since then, each once.
    """

    def __init__(
        self, layout: Layout, rows: Positions, scores: FloatArray, lookup: CopyLookup
    ) -> None:
        self.prompt = layout.ids
        self.taken = np.zeros(0, np.int64)
        self._stale = np.zeros(len(layout), dtype=bool)
        self._stale[layout.stale(rows)] = True
        self._lookup = lookup
        self._ahead = np.arange(lookup.tokens + 1)
        self._scores = np.zeros(len(layout) + lookup.tokens, dtype=np.float32)
        self._scores[layout.cached] = scores

    @property
    def repaired(self) -> int:
        """Number of recomputed positions."""
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
        """Return a draft's tokens before the first one with something to repair."""
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
        highest = self._scores[at[:, None] + self._ahead].max(axis=1)
        order = at[np.lexsort((-highest, -length))]
        near = (order[:, None] + self._ahead).reshape(-1)
        near = near[near < len(self.prompt)]
        near = near[self._stale[near]]
        _, first = np.unique(near, return_index=True)
        return np.sort(near[np.sort(first)[:most]])
