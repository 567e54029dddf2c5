"""Prompt lookup decoding: drafts of what an answer may copy, as long as they pay.

A step over several tokens costs little more than one over a single token, since it reads the
weights once. Drafts are the tokens behind the longest earlier occurrence of the last ones, in the
prompt or the answer. A step accepts those that the model itself would have drawn.
"""

from __future__ import annotations

from ragkv.prompt.history import TokenHistory

DEFAULT_LONGEST = 7
"""With the token before it, the eight rows up to which oneDNN's products cost about the same."""
_SHORTEST_MATCH = 2


class Drafts:
    """Proposes drafts for one answer, and learns from it how long they should be.

    Parameters
    ----------
    longest
        Most tokens of a draft; 0 drafts nothing, None is :data:`DEFAULT_LONGEST`.

    Attributes
    ----------
    proposed, accepted
        Tokens drafted and accepted so far.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.proposed = self.accepted = 0
        self._longest = DEFAULT_LONGEST if longest is None else longest

    def propose(self, history: TokenHistory, room: int) -> list[int]:
        """Return a draft of at most ``room`` tokens behind the history's last one."""
        most = min(self._longest, room)
        if most < 1:
            return []
        at, lengths = history.occurrences()
        if not len(at) or lengths.max() < _SHORTEST_MATCH:
            return []
        best = int(at[lengths == lengths.max()][-1])
        draft: list[int] = history.ids[best + 1 : best + 1 + most].tolist()
        return draft

    def record(self, proposed: int, accepted: int) -> None:
        """Count a draft's tokens, and those that the answer took."""
        self.proposed += proposed
        self.accepted += accepted
