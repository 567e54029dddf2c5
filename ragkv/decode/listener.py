"""Listeners to an answer's tokens as they are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from ragkv.answer.completion import TokenLogprobs


@dataclass(slots=True, eq=False)
class Progress:
    """Counts of a running answer's prompt and tokens, and the tokens' log-probabilities.

    ``chunks`` are the prompt's known chunks, set before the first token.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    chunks: tuple[str, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Listener(BaseStreamer):
    """Times and counts the tokens, records their log-probabilities, and forwards them.

    Parameters
    ----------
    on_token
        Called with every new token id as it is drawn.
    progress
        Updated with each token, before ``on_token``.
    top
        Number of most probable tokens to record with each token; None records nothing.
    ends
        Called after every token; True ends the answer.
    """

    def __init__(
        self,
        on_token: Callable[[int], None] | None = None,
        *,
        progress: Progress | None = None,
        top: int | None = None,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        self.first_at = self.last_at = 0.0
        self.scores = None if top is None else LastScores()
        self.progress = Progress() if progress is None else progress
        self._top = top or 0
        self._prompt_seen = False
        self._on_token = on_token
        self.ends = ends

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt once, then token by token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            self.progress.prompt_tokens = value.numel()
            return
        token = int(value.reshape(-1)[0])
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.progress.tokens += 1
        if self.scores is not None:
            self.progress.logprobs.append(self.scores.logprobs_of(token, self._top))
        if self._on_token is not None:
            self._on_token(token)

    def end(self) -> None:
        """Nothing to flush."""


class LastScores(LogitsProcessor):
    """Keeps the scores that the next token is drawn from, unchanged."""

    def __init__(self) -> None:
        self._row: torch.Tensor | None = None

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take and return ``[1, vocab]`` scores."""
        self._row = scores[0].clone()
        return scores

    def logprobs_of(self, token: int, top: int) -> TokenLogprobs:
        """Return the log-probabilities of a token drawn from the last scores.

        Raises
        ------
        RuntimeError
            No scores were seen since the last token.
        """
        row, self._row = self._row, None
        if row is None:
            raise RuntimeError("a token without scores")
        shares = torch.log_softmax(row.float(), dim=-1)
        best = shares.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprobs(token, float(shares[token]), tuple(pairs))
