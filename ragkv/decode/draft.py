"""Prompt lookup decoding: drafts of copied tokens, as long as they pay.

A draft is the continuation of the longest earlier occurrence of the last tokens, in the prompt or
the answer; the latest of equally long ones. The next step computes it together with the last token,
and the answer accepts the tokens that the model draws too. On a CPU a step over several tokens
costs little more than one over a single token, since it reads the weights once.
"""

from __future__ import annotations

from ragkv.prompt.history import TokenHistory

LONGEST = 15
_SHARES = {1: 0.3, 2: 0.5, 3: 0.72, 8: 0.88}
"""Share of accepted tokens by the match's least length, see docs/log.md."""
_PRIOR_TOKENS = 8
"""Number of an answer's own drafted tokens that weigh as much as the shares above."""
COSTS = {"float32": (1.25, 0.035), "bfloat16": (1.15, 0.09), "int4": (1.15, 0.13)}
"""Cost of a step over several tokens, and of each more token, by the products of several rows. A
step over a single token costs 1."""
_ANSWER = 0.25
"""Cost of each more answer's attention."""


class Drafts:
    """Proposes drafts for one answer, with a length that depends on earlier acceptance.

    The length maximises a step's expected tokens over its cost. It does not depend on measured
    times: the same prompt always has the same steps, and so the same rounding.

    Parameters
    ----------
    longest
        Most tokens of a draft; 0 drafts nothing.

    Attributes
    ----------
    proposed, accepted
        Tokens drafted and accepted so far.
    costs
        Cost of a step over several tokens, and of each more token, in steps over a single token.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.proposed = self.accepted = 0
        self.costs = COSTS["float32"]
        self._longest = longest
        self._taken = {match: _PRIOR_TOKENS * share for match, share in _SHARES.items()}
        self._tried = dict.fromkeys(_SHARES, float(_PRIOR_TOKENS))
        self._match = 1

    def propose(self, history: TokenHistory, room: int, answers: int = 1) -> list[int]:
        """Return a draft of at most ``room`` tokens after the history's last one.

        ``answers`` is the number of answers in the step.
        """
        most = min(self._longest, room)
        at, lengths = history.occurrences()
        if most < 1 or not len(at):
            return []
        longest = int(lengths.max())
        self._match = max(match for match in _SHARES if match <= longest)
        behind = int(at[lengths == longest][-1]) + 1
        draft: list[int] = history.ids[behind : behind + most].tolist()
        return draft[: self._best_length(len(draft), answers)]

    def record(self, proposed: int, accepted: int) -> None:
        """Count the last draft's tokens and the accepted ones."""
        self.proposed += proposed
        self.accepted += accepted
        self._taken[self._match] += accepted
        self._tried[self._match] += min(accepted + 1, proposed)  # later ones are untried

    def _best_length(self, most: int, answers: int = 1) -> int:
        """Return the number of tokens with the best yield over this answer's share of the cost."""
        share = self._taken[self._match] / self._tried[self._match]
        several, each = self.costs
        together = (several + _ANSWER * (answers - 1)) / answers
        best = 1.0 if answers == 1 else 1.0 / together
        length, expected, chance = 0, 1.0, 1.0
        for tokens in range(1, most + 1):
            chance *= share
            expected += chance
            gain = expected / (together + each * tokens)
            if gain > best:
                best, length = gain, tokens
        return length
